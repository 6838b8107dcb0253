"""What a row has is cut out of it, and put into an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.contract import Cut
from worker.prefixes.index import Item, PrefixIndex


class Cutter(Protocol):
    """Has rows; see `contract.Engine`."""

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        """Copies of a row's columns and states."""


def keep(
    index: PrefixIndex,
    cutter: Cutter,
    row: str,
    tokens: tuple[int, ...],
    *,
    salt: str,
    block_tokens: int,
    states: bool = True,
) -> list[Item]:
    """Store what is not known yet of a row that has just these tokens, at most so many in a block, and the
    `states` behind them, where some are needed. Raises what the cutter raises."""
    end = len(tokens)
    known, has_snapshot = index.reach(tokens, salt=salt, end=end)
    states = states and index.shape.has_states and not has_snapshot
    if known == end and not states:
        return []
    runs = [(first, min(first + block_tokens, end)) for first in range(known, end, block_tokens)]
    cuts, state = cutter.cut(row, runs, states=states)
    stored: list[Item] = []
    for (first, last), cut in zip(runs, cuts, strict=True):
        window_from = max(first, cut.whole_from)
        stored.append(
            index.add(tokens, first, last, cut.payload, cut.nbytes, salt=salt, window_from=window_from)
        )
    if state is not None:
        stored.append(index.add_snapshot(tokens, end, state.payload, state.nbytes, salt=salt))
    return stored
