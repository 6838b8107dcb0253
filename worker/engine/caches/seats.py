"""Where the rows of a batch stand."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from worker.engine.caches.spans import Gaps


class Seats:
    """Shared by the layers of a batch, moved by the batch.

    `lengths`: tokens each row has in its cache; `gaps`: which were left out before these. `column`: where the
    next token of every row goes. Columns are counted from an arbitrary point and may be negative; a row
    fills the `lengths[row]` ones before `column`.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.gaps: list[Gaps] = []
        self.column = 0
        self._offset: mx.array | None = None

    def seat(self, lengths: list[int], gaps: list[Gaps]) -> None:
        self.lengths, self.gaps = lengths, gaps
        self._offset = None

    def advance(self) -> None:
        """Every row has got one token more."""
        self.seat([length + 1 for length in self.lengths], self.gaps)
        self.column += 1

    @property
    def offset(self) -> mx.array:
        """[rows] int32: the position of each row's next token."""
        if self._offset is None:
            self._offset = mx.array(self._positions(), mx.int32)
        return self._offset

    def seen(self, windows: Sequence[int]) -> list[int]:
        """How many columns each row's next token looks at, its own among them, the last ones: a window counts
        positions, whether or not what stood there was left out."""
        if not windows:
            return [length + 1 for length in self.lengths]
        size = min(windows)
        positions = zip(self._positions(), self.gaps, strict=True)
        return [gaps.columns(at + 1 - size, at + 1) for at, gaps in positions]

    def _positions(self) -> list[int]:
        return [length + gaps.total for length, gaps in zip(self.lengths, self.gaps, strict=True)]
