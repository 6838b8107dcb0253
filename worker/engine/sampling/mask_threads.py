"""Thread pool for grammar masks: work between two tokens that may take long.

The caller begins alone: jobs of a few hundred microseconds end before another thread is awake. Then all
threads take jobs from one iterator, so none waits for a thread that has not started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

THREADS_MAX = 4
"""Maximum number of threads, the caller's included."""
ALONE_S_MAX = 0.0005

Job = Callable[[], None]


class MaskThreads:
    """Threads that start when first needed, and end with this object."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: number, the caller's included; None: the number of cores, up to `THREADS_MAX`."""
        self._others = (threads or min(THREADS_MAX, os.cpu_count() or 1)) - 1
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Job]) -> None:
        """Run each of the jobs once, in any order. They must not raise."""
        left, began = iter(jobs), time.perf_counter()
        called: list[Future[None]] = []
        for number, job in enumerate(left, start=1):
            job()
            if not called and time.perf_counter() - began > ALONE_S_MAX:
                called = self._call(left, len(jobs) - number - 1)
        for other in called:
            other.result()

    def _call(self, left: Iterator[Job], jobs: int) -> list[Future[None]]:
        """Start threads for all but one of the remaining jobs."""
        others = min(self._others, jobs)
        if others <= 0:
            return []
        self._pool = self._pool or ThreadPoolExecutor(self._others, thread_name_prefix="guides")
        return [self._pool.submit(_take, left) for _ in range(others)]


def _take(left: Iterator[Job]) -> None:
    # An iterator over a list never returns one item to two threads.
    for job in left:
        job()
