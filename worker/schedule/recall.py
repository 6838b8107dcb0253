"""What a draft model has read of rows that ended is kept, for rows that begin alike. On the model thread.

In memory only: it is read again sooner than files would pay. Nothing here can fail a request: what cannot be
kept or restored is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from worker.contract import Cut, Piece, Shape
from worker.drafts import Drafter
from worker.prefixes.index import Match, PrefixIndex
from worker.schedule.keeping import keep
from worker.schedule.rows import Row

log = logging.getLogger(__name__)

KEPT_TOKENS_MIN = 64
"""Less than that is not kept, nor restored."""
BLOCK_TOKENS = 512
"""The most of one stored run, which is forgotten as a whole."""
SAMPLED_TOKENS = 1024
"""By rows of so many it is told how much of the memory is the draft model's."""


@runtime_checkable
class Keeper(Drafter, Protocol):
    """A drafter whose rows can be made again. As `contract.Engine`."""

    shape: Shape | None

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        """Copies of what a row has read."""

    def restore(self, row: str, pieces: Sequence[Piece], states: object | None) -> None:
        """A row that has read all that the pieces have."""


class Recall:
    """What is kept of one draft model's rows. `share`: of the memory for stored prefixes, at the most."""

    def __init__(self, keeper: Keeper, shape: Shape, share: float) -> None:
        self.share = share
        self._keeper = keeper
        self._index = PrefixIndex(shape)
        self._is_broken = False

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return self._index.ram_bytes

    def until(self, row: Row, done: int, count: int) -> int:
        """How many of so many tokens of a row, behind those that are `done`, to read at once: where later
        prompts will be alike a state is kept."""
        ends = row.request.boundaries if self._index.shape.has_states else ()
        return min((end - done for end in ends if done < end < done + count), default=count)

    def has_read(self, row: Row) -> None:
        """The row has read some of its prompt."""
        if self._index.shape.has_states and self._keeper.length(row.id) in row.request.boundaries:
            self.keep(row)

    def keep(self, row: Row) -> None:
        """Keep what was read of a row, where it stands."""
        tokens = (*row.request.tokens, *row.answered)[: self._keeper.length(row.id)]
        if len(tokens) < KEPT_TOKENS_MIN or row.sparse or self._is_broken:
            return
        try:
            keep(self._index, self._keeper, row.id, tokens, salt=row.request.salt, block_tokens=BLOCK_TOKENS)
        except Exception:  # what cannot be kept is read again
            log.exception("%s: what the draft model has read cannot be kept", row.id)
            self._is_broken = True

    def restore(self, row: Row) -> None:
        """Have a row of which nothing was read begin with what is kept."""
        tokens = (*row.request.tokens, *row.answered)
        if self._keeper.length(row.id) or row.sparse or self._is_broken:
            return
        match = self._index.find(tokens, salt=row.request.salt, limit=len(tokens) - 1)
        if match.length < KEPT_TOKENS_MIN:
            return
        try:
            self._restore(row, match)
        except Exception:  # it is read
            log.exception("%s: what the draft model has read cannot be restored", row.id)
            self._keeper.drop(row.id)
            self._is_broken = True

    def _restore(self, row: Row, match: Match) -> None:
        pieces = [Piece(b.payload, b.first, b.last, count) for b, count in match.pieces]
        self._keeper.restore(row.id, pieces, match.snapshot.payload if match.snapshot else None)
        self._index.count(match, prompt_tokens=len(row.request.tokens), miss=match.miss)

    def fit(self, bytes_max: int) -> None:
        """Forget what goes beyond that."""
        self._index.shrink_ram(bytes_max)

    def clear(self) -> int:
        """Forget all: bytes given back."""
        before = self.nbytes
        self._index.clear()
        return before - self.nbytes


def open_recall(drafter: Drafter | None, row_bytes: int) -> Recall | None:
    """None: nobody drafts whose rows could be made again. `row_bytes`: what a row of `SAMPLED_TOKENS`
    takes, the drafter's included."""
    if not isinstance(drafter, Keeper) or drafter.shape is None:
        return None
    return Recall(drafter, drafter.shape, drafter.row_bytes(SAMPLED_TOKENS) / max(1, row_bytes))
