"""Which rows share a batch. Pure.

A batch gives every row as much room as its longest has. When that takes too much more than the rows would
alone, they are put into groups of like length; each group costs a forward pass of its own in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

COLUMNS_STEP = 256
"""Buffers grow by so many tokens at a time, as upstream's do."""

RATIO_MAX = 1.4
"""The room that all rows take in their groups, in terms of what they would take alone."""

SLACK = 1.07
"""The room of a buffer, in terms of what its rows take. With `RATIO_MAX` it stays below one and a half."""

RATIO_JOINED = 1.25
"""Groups are joined again only when they then stay below this, or rows would be moved to and fro."""


def columns_for(tokens: int) -> int:
    """Columns of a buffer that has to hold so many tokens."""
    return -(-tokens // COLUMNS_STEP) * COLUMNS_STEP


def room(length: int) -> int:
    """Columns that a row of `length` tokens, with the one it feeds next, takes alone."""
    return columns_for(length)


def ratio(groups: Sequence[Sequence[int]]) -> float:
    """The room that `groups` of rows, given by their lengths, take for one unit of what they need."""
    alone = sum(room(length) for group in groups for length in group)
    taken = sum(room(max(group)) * len(group) for group in groups if group)
    return taken / alone if alone else 1.0


def partition(lengths: Sequence[int], ratio_max: float = RATIO_MAX) -> list[list[int]]:
    """The fewest groups of row numbers that stay within `ratio_max`, of these the ones with least room."""
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])
    ordered = [lengths[row] for row in by_length]
    for count in range(1, len(ordered) + 1):
        cuts = _best_cuts(ordered, count)
        groups = [by_length[a:b] for a, b in zip([0, *cuts], [*cuts, len(ordered)], strict=True)]
        if ratio([[lengths[row] for row in group] for group in groups]) <= ratio_max:
            return groups
    return []


def _best_cuts(ordered: Sequence[int], count: int) -> list[int]:
    """Where to cut rows in order of length into `count` groups so that they take the least room."""
    rows = len(ordered)
    # best[end]: least room for the first `end` rows, with the cuts that lead there.
    best: list[tuple[int, list[int]]] = [(room(ordered[end - 1]) * end, []) for end in range(1, rows + 1)]
    best.insert(0, (0, []))
    for _ in range(count - 1):
        better = list(best)
        for end in range(1, rows + 1):
            for cut in range(1, end):
                taken = best[cut][0] + room(ordered[end - 1]) * (end - cut)
                if taken < better[end][0]:
                    better[end] = (taken, [*best[cut][1], cut])
        best = better
    return best[rows][1]


def place(groups: Sequence[Sequence[int]], length: int) -> int:
    """The group that a row should join; `len(groups)` for a new one."""
    best, best_ratio = len(groups), RATIO_MAX
    for index in range(len(groups)):
        joined = [[*group, length] if index == at else group for at, group in enumerate(groups)]
        if ratio(joined) <= best_ratio:
            best, best_ratio = index, ratio(joined)
    return best


def is_fine(groups: Sequence[Sequence[int]]) -> bool:
    """Whether the groups can stay as they are: within bounds, and no two of them better joined."""
    if ratio(groups) > RATIO_MAX:
        return False
    if len(groups) < 2:
        return True
    everybody = [length for group in groups for length in group]
    return len(partition(everybody, RATIO_JOINED)) >= len(groups)
