"""Copies a row's cache into a prefix index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.contract.engine import CacheSlice
from worker.prefixes.index import Item, PrefixIndex

BLOCK_TOKENS = 512
"""Maximum length of a block, which is evicted as a whole."""


class CacheCopier(Protocol):
    """The part of `Engine` that copies row caches."""

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        """Copy slices of a row's KV columns, and its recurrent states."""


def keep(
    index: PrefixIndex,
    source: CacheCopier,
    row: str,
    tokens: tuple[int, ...],
    *,
    salt: str,
    block_tokens: int,
    states: bool = True,
) -> list[Item]:
    """Store the part of a row's cache that the index lacks, in blocks of at most `block_tokens`.

    `tokens`: exactly those in the row's cache. `states`: store a snapshot of recurrent states at their end as
    well, if needed. Raises what `source` raises.
    """
    end = len(tokens)
    known, has_snapshot = index.reach(tokens, salt=salt, end=end)
    states = states and index.shape.has_states and not has_snapshot
    if known == end and not states:
        return []
    runs = [(first, min(first + block_tokens, end)) for first in range(known, end, block_tokens)]
    cuts, state = source.copy_cache(row, runs, states=states)
    stored: list[Item] = []
    for (first, last), cut in zip(runs, cuts, strict=True):
        window_from = max(first, cut.complete_from)
        stored.append(
            index.add(tokens, first, last, cut.payload, cut.nbytes, salt=salt, window_from=window_from)
        )
    if state is not None:
        stored.append(index.add_snapshot(tokens, end, state.payload, state.nbytes, salt=salt))
    return stored
