"""Who has reserved how many bytes for caches.

A row reserves for its length and what is left of a block, so that it grows for a while before it must ask
again. What must always hold: `reserved` is the sum of all rows' `bytes`, and a row alone never exceeds
`bytes_max`. What caches really take may be more, where rows that run together are padded for instance: how
much more is remembered, and forgotten bit by bit as rows leave.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable

from worker.schedule.rows import Row

BLOCK_TOKENS = 64
_MEMORY = 0.9


class Ledger:
    """`row_bytes`: what the caches of a row of so many tokens take. Not called where nothing is limited."""

    def __init__(self, bytes_max: int | None, row_bytes: Callable[[int], int]) -> None:
        self.bytes_max = sys.maxsize if bytes_max is None else bytes_max
        self.reserved = 0
        self._row_bytes = row_bytes
        self._is_limited = bytes_max is not None
        self._excess = 1.0
        self.block_bytes = self.needs(2 * BLOCK_TOKENS - 1) - self.needs(BLOCK_TOKENS - 1)
        """By how much a row grows with a block."""

    def needs(self, length: int) -> int:
        """Bytes that a row of this length would reserve."""
        return self._row_bytes(_roof(length)) if self._is_limited else 0

    def free(self, cache_bytes: int) -> float:
        """Bytes that rows may still reserve, where all caches really take `cache_bytes`."""
        return self.bytes_max / self._excess - max(self.reserved, cache_bytes / self._excess)

    def spare(self, cache_bytes: int) -> int | None:
        """Bytes that are neither reserved nor taken; None where nothing is limited."""
        return max(0, self.bytes_max - max(self.reserved, cache_bytes)) if self._is_limited else None

    def learn(self, cache_bytes: int) -> None:
        """What is reserved really takes so much."""
        self._excess = max(self._excess, cache_bytes / max(1, self.reserved))

    def tokens_max(self, bound: int) -> int:
        """The longest row that fits alone, if it is below `bound`, or else the longest below it."""
        return max(0, bisect.bisect_right(range(bound), self.bytes_max, key=self.needs) - 1)

    def reserve(self, row: Row) -> bool:
        """For the row's length now, in place of what it has. False: that does not fit even alone."""
        needed = self.needs(row.length)
        if needed > self.bytes_max:
            return False
        self.reserved += needed - row.bytes
        row.bytes = needed
        row.roof = _roof(row.length) if self._is_limited else sys.maxsize
        return True

    def release(self, row: Row) -> None:
        self.reserved -= row.bytes
        row.bytes = row.roof = 0

    def forget(self) -> None:
        """A row has left."""
        self._excess = 1 + _MEMORY * (self._excess - 1)


def _roof(length: int) -> int:
    return (length // BLOCK_TOKENS + 1) * BLOCK_TOKENS
