"""Positions of the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from worker.engine.caches.spans import Gaps


class BatchPositions:
    """Positions shared by the layers of a batch, and advanced by the batch.

    `lengths`: tokens in each row's caches. `gaps`: tokens skipped before these. `column`: where the next
    token of every row goes. Columns are counted from an arbitrary origin and may be negative. A row fills the
    `lengths[row]` columns before `column`.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.gaps: list[Gaps] = []
        self.column = 0
        self._offset: mx.array | None = None

    def assign(self, lengths: list[int], gaps: list[Gaps]) -> None:
        self.lengths, self.gaps = lengths, gaps
        self._offset = None

    def advance(self) -> None:
        """Advance every row by one token."""
        self.assign([length + 1 for length in self.lengths], self.gaps)
        self.column += 1

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, [rows] int32."""
        if self._offset is None:
            self._offset = mx.array(self._positions(), mx.int32)
        return self._offset

    def seen(self, windows: Sequence[int]) -> list[int]:
        """Return how many of the last columns each row's next token attends to, its own included. A window
        counts positions, skipped ones as well."""
        if not windows:
            return [length + 1 for length in self.lengths]
        size = min(windows)
        positions = zip(self._positions(), self.gaps, strict=True)
        return [gaps.columns(at + 1 - size, at + 1) for at, gaps in positions]

    def _positions(self) -> list[int]:
        return [length + gaps.total for length, gaps in zip(self.lengths, self.gaps, strict=True)]
