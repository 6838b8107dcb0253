"""Several threads for what must be done between a token and the next, where it turns out to be long.

The caller begins alone: what takes a few hundred microseconds is over before another thread is awake. Then
everybody takes the next job from one iterator, so nobody waits for a thread that has not come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

THREADS_MAX = 4
"""With the caller's own."""
ALONE_S_MAX = 0.0005

Job = Callable[[], None]


class Helpers:
    """Threads are started when they are first needed, and end with this object."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: with the caller's own; None: as many as there are cores, up to `THREADS_MAX`."""
        self._others = (threads or min(THREADS_MAX, os.cpu_count() or 1)) - 1
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all the jobs, each once, in any order. They raise nothing."""
        left, began = iter(jobs), time.perf_counter()
        called: list[Future[None]] = []
        for number, job in enumerate(left, start=1):
            job()
            if not called and time.perf_counter() - began > ALONE_S_MAX:
                called = self._call(left, len(jobs) - number - 1)
        for other in called:
            other.result()

    def _call(self, left: Iterator[Job], jobs: int) -> list[Future[None]]:
        """Somebody for all but one of so many jobs."""
        others = min(self._others, jobs)
        if others <= 0:
            return []
        self._pool = self._pool or ThreadPoolExecutor(self._others, thread_name_prefix="guides")
        return [self._pool.submit(_take, left) for _ in range(others)]


def _take(left: Iterator[Job]) -> None:
    # Of one iterator over a list two threads are never given the same item.
    for job in left:
        job()
