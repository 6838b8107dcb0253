"""KV memory reservations of rows.

A row reserves memory for its length rounded up to a block, so that it can grow before it reserves again.
Invariants: `reserved` is the sum of all rows' `bytes`, and a single row never exceeds `bytes_max`. Real usage
may be higher, for instance because batched rows are padded: the ratio is learned, and decays as rows leave.
What is decoded of images stays until the answer ends, as a preempted row needs it again; it counts as well.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable

from protocol.errors import Code, RequestError
from worker.core.rows import Row

BLOCK_TOKENS = 64
"""Tokens by which a reservation grows, so that a row reserves once in as many steps."""
BUSY_S = 5.0
"""Retry-After of a request whose images find no room."""
_MEMORY = 0.9
"""Share of the learned excess that is left when a row has gone."""


class Reservations:
    """Reservations of one worker. `row_bytes`: cache bytes of a row by its length; not called without a
    limit."""

    def __init__(self, bytes_max: int | None, row_bytes: Callable[[int], int], aside_bytes: int = 0) -> None:
        """`aside_bytes`: left to others than caches at all times; see `set_aside`."""
        self._whole = sys.maxsize if bytes_max is None else bytes_max
        self._aside = aside_bytes
        self.bytes_max = max(0, self._whole - aside_bytes)
        self.reserved = 0
        self.pixel_bytes = 0
        """Bytes of the decoded images of all rows, those that wait included."""
        self._row_bytes = row_bytes
        self._is_limited = bytes_max is not None
        self._excess = 1.0
        self.block_bytes = self.needs(2 * BLOCK_TOKENS - 1) - self.needs(BLOCK_TOKENS - 1)
        """Bytes that a further block adds to a row."""

    def needs(self, length: int) -> int:
        """Return the bytes that a row of this length reserves."""
        return self._row_bytes(_reserved_length(length)) if self._is_limited else 0

    def free(self, cache_bytes: int) -> float:
        """Return the bytes that rows may still reserve while all caches really take `cache_bytes`."""
        limit = max(0, self.bytes_max - self.pixel_bytes)
        return limit / self._excess - max(self.reserved, cache_bytes / self._excess)

    def spare(self, cache_bytes: int) -> int | None:
        """Return the bytes that are neither reserved nor in use; None without a limit."""
        used = self.pixel_bytes + max(self.reserved, cache_bytes)
        return max(0, self.bytes_max - used) if self._is_limited else None

    def hold_pixels(self, row: Row) -> None:
        """Count the decoded images of a row that comes. Raises `RequestError` if those of others leave no
        room for it now."""
        needed = self.pixel_bytes + row.pixel_bytes + self.needs(row.length)
        if self.pixel_bytes and row.pixel_bytes and needed > self.bytes_max:
            message = "The memory for images of other requests is full."
            raise RequestError(Code.TEXT_GENERATION_BUSY, message, retry_after_s=BUSY_S)
        self.pixel_bytes += row.pixel_bytes

    def set_aside(self, nbytes: int) -> None:
        """Leave this many bytes to others than caches from now on, or more if that was agreed."""
        self.bytes_max = max(0, self._whole - max(nbytes, self._aside))

    def room_aside(self, nbytes: int, length: int) -> int:
        """Return the bytes that others may take in addition to their `nbytes`, so that a row of this length
        still fits."""
        return max(self._aside - nbytes, 0) + max(0, self.bytes_max - self.needs(length))

    def learn(self, cache_bytes: int) -> None:
        """Record the real usage of what is reserved."""
        self._excess = max(self._excess, cache_bytes / max(1, self.reserved))

    def tokens_max(self, bound: int) -> int:
        """Return the length of the longest row below `bound` that fits alone."""
        return max(0, bisect.bisect_right(range(bound), self.bytes_max, key=self.needs) - 1)

    def reserve(self, row: Row) -> bool:
        """Replace the row's reservation by one for its current length. False: it does not fit even alone."""
        needed = self.needs(row.length)
        if needed > self.bytes_max:
            return False
        self.reserved += needed - row.bytes
        row.bytes = needed
        row.reserved_length = _reserved_length(row.length) if self._is_limited else sys.maxsize
        return True

    def release(self, row: Row) -> None:
        self.reserved -= row.bytes
        row.bytes = row.reserved_length = 0

    def forget(self) -> None:
        """Let the learned excess decay: a row has left."""
        self._excess = 1 + _MEMORY * (self._excess - 1)


def _reserved_length(length: int) -> int:
    return (length // BLOCK_TOKENS + 1) * BLOCK_TOKENS
