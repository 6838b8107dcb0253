"""Thread offload of large request bodies, so that they do not block the event loop.

Converting a body is pure code that takes microseconds for most requests. A conversation of a megabyte takes
milliseconds, one of thousands of short messages tens of them, and all streams would stall meanwhile. Such
bodies go to one thread, in order. More threads would only take the interpreter lock from the loop more often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protocol.errors import Code, RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGE_BODY_BYTES = 2**16
"""Smaller bodies take a fraction of a millisecond, or a few milliseconds if all messages are tiny."""
WORK_S_MAX = 60.0
"""Timeout in seconds, equal to that of a body's arrival. All bodies that fit the budget take less; work that
hangs blocks the thread and all later bodies."""


class BodyOffload:
    """Owner of the thread, which is started for the first large body."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-bodies")

    async def work(self, body_bytes: int, work: Callable[[], T]) -> T:
        """Return what `work` returns; it runs at once if `body_bytes` is small, otherwise on the thread.

        Work of a client that disconnects before its turn is skipped. Raises what `work` raises, or
        `RequestError(text_generation_busy)` if it is not done within `WORK_S_MAX`.
        """
        if body_bytes < LARGE_BODY_BYTES:
            return work()
        try:
            async with asyncio.timeout(WORK_S_MAX) as limit:
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            if not limit.expired():
                raise
            log.error("a body of %d bytes was not processed within %g s", body_bytes, WORK_S_MAX)
            message = f"The server did not process this request's body within {WORK_S_MAX:g} s."
            raise RequestError(Code.TEXT_GENERATION_BUSY, message, retry_after_s=WORK_S_MAX) from None

    def close(self) -> None:
        """Cancel the work that waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
