"""Prefix cache of the draft model: KV caches of finished rows, for rows with the same prefix.

On the model thread, and in memory only: computing them again is quicker than files would be. Nothing here can
fail a request: what cannot be stored or restored is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from worker.contract.device_errors import raise_if_device_failed
from worker.contract.drafts import DraftProposer
from worker.contract.engine import CacheSegment, CacheSlice, CacheSpec
from worker.prefixes.index import BLOCK_TOKENS, PrefixIndex, keep
from worker.prefixes.matching import Match
from worker.schedule.rows import Row

log = logging.getLogger(__name__)

KEPT_TOKENS_MIN = 64
"""Minimum length of a prefix that is stored or restored."""
SAMPLED_TOKENS = 1024
"""Row length at which the draft model's share of the cache memory is computed."""


@runtime_checkable
class RestorableDrafter(DraftProposer, Protocol):
    """A drafter whose rows can be stored and restored, as in `Engine`."""

    shape: CacheSpec | None

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        """Copy slices of a row's cache."""

    def restore(self, row: str, pieces: Sequence[CacheSegment], states: object | None) -> None:
        """Create a row from stored segments."""


class DraftPrefixCache:
    """Stored prefixes of one draft model. `memory_share`: maximum share of the memory for stored prefixes."""

    def __init__(self, keeper: RestorableDrafter, shape: CacheSpec, memory_share: float) -> None:
        self.memory_share = memory_share
        self._keeper = keeper
        self._index = PrefixIndex(shape)
        self._is_broken = False

    @property
    def nbytes(self) -> int:
        """Bytes of all stored prefixes."""
        return self._index.ram_bytes

    def until(self, row: Row, done: int, count: int) -> int:
        """Return how many of the `count` tokens after `done` to prefill at once.

        With recurrent layers a chunk ends at each boundary of the prompt, so that the state there is stored.
        """
        ends = row.request.boundaries if self._index.shape.has_states else ()
        return min((end - done for end in ends if done < end < done + count), default=count)

    def has_read(self, row: Row) -> None:
        """Store the row's prefix if the drafter's prefill has reached a boundary."""
        if self._index.shape.has_states and self._keeper.length(row.id) in row.request.boundaries:
            self.keep(row)

    def keep(self, row: Row) -> None:
        """Store what the drafter has computed of a row."""
        tokens = (*row.request.tokens, *row.answered)[: self._keeper.length(row.id)]
        if len(tokens) < KEPT_TOKENS_MIN or row.sparse or self._is_broken:
            return
        try:
            keep(self._index, self._keeper, row.id, tokens, salt=row.request.salt, block_tokens=BLOCK_TOKENS)
        except Exception as error:  # what cannot be stored is computed again
            raise_if_device_failed(error)
            log.exception("%s: the draft model's cache cannot be stored; its prefix cache is off", row.id)
            self._is_broken = True

    def restore(self, row: Row) -> None:
        """Restore the longest stored prefix of a new row."""
        tokens = (*row.request.tokens, *row.answered)
        if self._keeper.length(row.id) or row.sparse or self._is_broken:
            return
        match = self._index.find(tokens, salt=row.request.salt, limit=len(tokens) - 1)
        if match.length < KEPT_TOKENS_MIN:
            return
        try:
            self._restore(row, match)
        except Exception as error:  # it is computed instead
            raise_if_device_failed(error)
            log.exception("%s: the draft model's cache cannot be restored; its prefix cache is off", row.id)
            self._keeper.drop(row.id)
            self._is_broken = True

    def _restore(self, row: Row, match: Match) -> None:
        pieces = [CacheSegment(b.payload, b.first, b.last, count) for b, count in match.pieces]
        self._keeper.restore(row.id, pieces, match.snapshot.payload if match.snapshot else None)
        self._index.count(match, prompt_tokens=len(row.request.tokens), miss=match.miss)

    def fit(self, bytes_max: int) -> None:
        """Evict prefixes until they take at most `bytes_max`."""
        self._index.shrink_ram(bytes_max)

    def clear(self, namespace: str = "") -> int:
        """Evict the prefixes of a namespace and return the bytes freed."""
        before = self.nbytes
        self._index.clear(namespace)
        return before - self.nbytes


def open_draft_prefix_cache(drafter: DraftProposer | None, row_bytes: int) -> DraftPrefixCache | None:
    """Create the prefix cache of a drafter; None if its rows cannot be restored, or there is no drafter.

    `row_bytes`: cache bytes of a row of `SAMPLED_TOKENS`, the drafter's included.
    """
    if not isinstance(drafter, RestorableDrafter) or drafter.shape is None:
        return None
    return DraftPrefixCache(drafter, drafter.shape, drafter.row_bytes(SAMPLED_TOKENS) / max(1, row_bytes))
