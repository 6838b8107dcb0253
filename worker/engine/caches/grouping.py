"""Batch grouping: which rows share a batch. Pure.

A batch gives every row as much memory as its longest row needs. When that takes too much more than the rows
would take alone, they are split into groups of similar length. Each group costs a forward pass of its own in
each step, which reads all weights. Padding that is read faster than the weights, the *slack*, is therefore
no reason for a split. `--exact` may limit the rows of a group (`rows_max`; None: no limit).
"""

from __future__ import annotations

from collections.abc import Sequence

COLUMNS_STEP = 256
"""Number of columns by which buffers grow at a time, as upstream's do."""

RATIO_MAX = 1.4
"""Maximum of the memory that all rows take in their groups, relative to what they would take alone."""

SLACK, GROWTH, EMPTY_MAX = 1.07, 1.2, 1.33
"""Memory of a buffer relative to what its rows take: of a new one, of a new one within the slack, and at most
when rows have left. A buffer without room is copied, as is one with more, which takes as long as one to three
steps: when 64 rows leave one after another, 20 times with these, and 63 times if `SLACK` is the maximum."""

RATIO_JOINED = 1.25
"""Groups are merged only if the ratio then stays below this, to avoid moving rows back and forth."""


def columns_for(tokens: int) -> int:
    """Return the columns of a buffer for `tokens` tokens."""
    return -(-tokens // COLUMNS_STEP) * COLUMNS_STEP


def room(length: int) -> int:
    """Return the columns that a row of `length` tokens, including the one it feeds next, takes alone."""
    return columns_for(length)


def ratio(groups: Sequence[Sequence[int]]) -> float:
    """Return the memory of `groups`, lists of row lengths, relative to what the rows take alone."""
    alone = sum(room(length) for group in groups for length in group)
    taken = sum(room(max(group)) * len(group) for group in groups if group)
    return taken / alone if alone else 1.0


def fits(groups: Sequence[Sequence[int]], slack: int = 0, ratio_max: float = RATIO_MAX) -> bool:
    """Return whether padding is within bounds: by ratio, or at most `slack` columns in all.

    A lower `ratio_max` lowers both bounds.
    """
    alone = sum(room(length) for group in groups for length in group)
    padding = (ratio(groups) - 1.0) * alone
    return padding <= (ratio_max - 1.0) * max(alone, slack / (RATIO_MAX - 1.0)) + 1e-6


def partition(
    lengths: Sequence[int], slack: int = 0, ratio_max: float = RATIO_MAX, rows_max: int | None = None
) -> list[list[int]]:
    """Return the fewest groups of row indices that are within the bounds of `fits`; of these the ones with
    least memory. Groups of more than `rows_max` rows are then divided."""
    groups = _fewest(lengths, slack, ratio_max)
    if rows_max is None:
        return groups
    return [group[first : first + rows_max] for group in groups for first in range(0, len(group), rows_max)]


def _fewest(lengths: Sequence[int], slack: int, ratio_max: float) -> list[list[int]]:
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])
    ordered = [lengths[row] for row in by_length]
    for count in range(1, len(ordered) + 1):
        cuts = _best_cuts(ordered, count)
        groups = [by_length[a:b] for a, b in zip([0, *cuts], [*cuts, len(ordered)], strict=True)]
        if fits([[lengths[row] for row in group] for group in groups], slack, ratio_max):
            return groups
    return []


def _best_cuts(ordered: Sequence[int], count: int) -> list[int]:
    """Return where to cut rows, sorted by length, into `count` groups with the least memory."""
    rows = len(ordered)
    # best[end]: the least memory for the first `end` rows, with the cuts that give it.
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


def place(groups: Sequence[Sequence[int]], length: int, slack: int = 0, rows_max: int | None = None) -> int:
    """Return the group that a row should join; `len(groups)` for a new one."""
    joined = [
        [[*group, length] if index == at else group for at, group in enumerate(groups)]
        for index in range(len(groups))
    ]
    fitting = [
        index
        for index, group in enumerate(groups)
        if (rows_max is None or len(group) < rows_max) and fits(joined[index], slack)
    ]
    return min(fitting, key=lambda index: ratio(joined[index]), default=len(groups))


def is_fine(groups: Sequence[Sequence[int]], slack: int = 0, rows_max: int | None = None) -> bool:
    """Return whether the groups can stay: within bounds, and no two of them worth merging."""
    if not fits(groups, slack):
        return False
    if len(groups) < 2:
        return True
    lengths = [length for group in groups for length in group]
    return len(partition(lengths, slack, RATIO_JOINED, rows_max)) >= len(groups)
