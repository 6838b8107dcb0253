"""Prefix matching: the longest restorable prefix on a path of stored blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from worker.core.prefix.items import BlockPart, Item, Snapshot
from worker.core.prefix.tree import snapshots_of
from worker.values import CacheSpec

Place = Literal["none", "ram", "disk"]


@dataclass(frozen=True, slots=True)
class Match:
    """Stored prefix of a prompt: `length` keys as `pieces` from position 0 on, and the `snapshot` at its end
    if the model has states.

    `known`: number of keys that blocks hold. `miss`: why the match is not longer. `items`: all items used;
    `missing`: those not in memory. `tier`: `disk` if any is missing, or was loaded and not used since.
    """

    length: int = 0
    pieces: tuple[BlockPart, ...] = ()
    snapshot: Snapshot | None = None
    known: int = 0
    miss: str = ""
    items: tuple[Item, ...] = ()
    missing: tuple[Item, ...] = ()
    tier: Place = "none"


def match_of(path: Sequence[BlockPart], length: int, snapshot: Snapshot | None, miss: str) -> Match:
    """Return the match of the first `length` positions of a path."""
    pieces = tuple(
        BlockPart(block, min(tokens, length - block.first)) for block, tokens in path if block.first < length
    )
    items = (*(block for block, _ in pieces), *([snapshot] if snapshot else []))
    missing = tuple(item for item in items if item.payload is None)
    tier: Place = "disk" if missing or any(item.is_fresh for item in items) else "ram"
    known = path[-1].end if path else 0
    return Match(length, pieces, snapshot, known, miss, items, missing, tier if length else "none")


def longest(
    path: Sequence[BlockPart], shape: CacheSpec, *, ram_only: bool = False
) -> tuple[int, Snapshot | None]:
    """Return the last position on a path at which every layer can be restored (0: none), and its snapshot."""
    end = path[-1].end if path else 0
    if ram_only:
        end = next((part.block.first for part in path if part.block.payload is None), end)
    gaps = _gaps(path, shape.window)
    end = _settle(end, gaps)
    if not shape.has_states:
        return end, None
    for part in reversed(path):
        for snapshot in sorted(snapshots_of(part), key=lambda snapshot: -snapshot.at):
            at = snapshot.at
            if at <= end and _settle(at, gaps) == at and not (ram_only and snapshot.payload is None):
                return at, snapshot
    return 0, None


def _gaps(path: Iterable[BlockPart], window: int) -> list[tuple[int, int]]:
    """Return the intervals (exclusive) in which sliding-window layers cannot be restored."""
    return [
        (block.first, min(block.window_from, block.first + tokens) + window)
        for block, tokens in path
        if window and block.window_from > block.first
    ]


def _settle(position: int, gaps: Sequence[tuple[int, int]]) -> int:
    """Return the last position up to `position` that lies in no gap."""
    for begin, end in reversed(gaps):
        if begin < position < end:
            position = begin
    return position
