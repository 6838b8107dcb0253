"""Large bodies, worked on beside the event loop.

What a body becomes is decided by pure code, in microseconds for most of what clients send. A conversation of
a megabyte takes milliseconds, one of thousands of short messages tens of them, and for so long every stream
would stand still. Such bodies go to one thread, in turn: Python runs one thread at a time and hands over
every few milliseconds, so that more of them would only come between the loop and its turn more often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE_BODY_BYTES = 2**16
"""Below that it takes a fraction of a millisecond, and a few where all messages are tiny."""


class Aside:
    """Owns the thread, which is there from the first large body on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-bodies")

    async def work(self, body_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises; at once, where the body that it is about is not large. A client who
        has gone before its turn has no work done."""
        if body_bytes < LARGE_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Who is still in line is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
