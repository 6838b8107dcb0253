"""Where the rows of a batch stand."""

from __future__ import annotations

import mlx.core as mx


class Seats:
    """Shared by the layers of a batch, moved by the batch.

    `lengths`: tokens each row has in its cache; `gaps`: how many were left out before these. `column`: where
    the next token of every row goes. Columns are counted from an arbitrary point and may be negative; a row
    fills the `lengths[row]` ones before `column`.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.gaps: list[int] = []
        self.column = 0
        self._offset: mx.array | None = None

    def seat(self, lengths: list[int], gaps: list[int]) -> None:
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
            positions = [length + gap for length, gap in zip(self.lengths, self.gaps, strict=True)]
            self._offset = mx.array(positions, mx.int32)
        return self._offset
