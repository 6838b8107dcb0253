"""How much of a path through the stored blocks a row can begin with, and why not more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from worker.contract import Shape
from worker.pictures import MEDIA_KEYS
from worker.prefixes.eviction import Forgotten
from worker.prefixes.items import Block, Item, Part, Snapshot
from worker.prefixes.tree import snapshots_of

Place = Literal["none", "ram", "disk"]


@dataclass(frozen=True, slots=True)
class Match:
    """The first `length` keys of a prompt are stored as `pieces`, from position 0 on, and as the `snapshot`
    there, where states are needed.

    `known`: so many keys blocks have. `miss`: why it is not longer. `items`: all that it uses; `missing`:
    what is not in memory. `tier`: `disk` if any is missing, or was and has not been used since.
    """

    length: int = 0
    pieces: tuple[Part, ...] = ()
    snapshot: Snapshot | None = None
    known: int = 0
    miss: str = ""
    items: tuple[Item, ...] = ()
    missing: tuple[Item, ...] = ()
    tier: Place = "none"


def match_of(path: Sequence[Part], length: int, snapshot: Snapshot | None, miss: str) -> Match:
    """The match of the first `length` positions of a path."""
    pieces = tuple(
        Part(block, min(tokens, length - block.first)) for block, tokens in path if block.first < length
    )
    items = (*(block for block, _ in pieces), *([snapshot] if snapshot else []))
    missing = tuple(item for item in items if item.payload is None)
    tier: Place = "disk" if missing or any(item.is_fresh for item in items) else "ram"
    known = path[-1].end if path else 0
    return Match(length, pieces, snapshot, known, miss, items, missing, tier if length else "none")


def longest(path: Sequence[Part], shape: Shape, *, ram_only: bool = False) -> tuple[int, Snapshot | None]:
    """The last position on a path at which every layer can be restored, and the snapshot there. 0: none."""
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


def why_not_longer(
    keys: tuple[int, ...], path: Sequence[Part], length: int, root: Block, shape: Shape, forgotten: Forgotten
) -> str:
    """Why no more than `length` keys of a prompt, which is less than was asked for, are stored. `root`: what
    the path begins on."""
    known = path[-1].end if path else 0
    if length < known:
        if longest(path, Shape(shape.window))[0] == length:
            return "no_window"
        return "evicted" if forgotten.had_snapshot(path, length) else "no_snapshot"
    block = path[-1].block if path else root
    if forgotten.had_block(block.digest, keys, known):
        return "evicted"
    if not root.children:
        return "empty"
    others = [*block.keys[known - block.first :][:1], *block.children.get(known, ())]
    if others and max(keys[known], *others) >= MEDIA_KEYS:
        return "media_differs"
    return f"diverged_at_{known}"


def _gaps(path: Iterable[Part], window: int) -> list[tuple[int, int]]:
    """Where sliding layers cannot be restored: strictly between these positions."""
    return [
        (block.first, min(block.window_from, block.first + tokens) + window)
        for block, tokens in path
        if window and block.window_from > block.first
    ]


def _settle(position: int, gaps: Sequence[tuple[int, int]]) -> int:
    """The last position that is in no gap, up to this one."""
    for begin, end in reversed(gaps):
        if begin < position < end:
            position = begin
    return position
