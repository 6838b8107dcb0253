"""What the schedule asks of a network that guesses what rows say next. As `worker.contract`, no MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

NO_DRAFTS: Mapping[str, Sequence[int]] = {}

PRICED_COLUMNS = 5
"""Tokens that a row is fed at once when it is measured what such a step costs."""
LATE_MAX = 8
"""Of a row that is further behind more is read before it is drafted for."""


class Drafter(Protocol):
    """A network with a row of its own for whichever rows of an engine it is asked about, under their names.

    Used by the model thread only. What it guesses changes nothing of what is said, only how fast.
    """

    share: float
    """What a pass costs it, in terms of what a token costs the engine's model."""
    block: int
    """So many tokens of a row it guesses in one pass, at the most."""

    def knows(self, row: str) -> bool:
        """It could read what it has not read of the row."""

    def length(self, row: str) -> int:
        """So many of the row's tokens it has read, or will never; 0 of a new one."""

    def read(self, row: str, tokens: Sequence[int]) -> None:
        """Run those that come next of a row. Returns when they are computed."""

    def draft(self, news: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        """What each of these rows says next, so many tokens, or as many as can be guessed. `news`: its tokens
        that have not been read yet, one at least and `LATE_MAX` at the most, which are read now."""

    def drop(self, row: str) -> None:
        """Forget a row. Unknown ones are no error."""

    def reset(self) -> None:
        """Forget every row."""

    def cache_bytes(self) -> int:
        """Bytes held by the caches of its rows."""

    def row_bytes(self, tokens: int) -> int:
        """Bytes that the caches of one row of so many tokens will take."""


class Weigher(Drafter, Protocol):
    """A drafter that can tell what it has looked at."""

    def weigh(self, row: str, last: int) -> Sequence[float] | None:
        """How much each token that the row has read matters to what comes behind `last`, the one after them.
        None: a part of the work is done, about a step's; ask again. The row stays as it is."""
