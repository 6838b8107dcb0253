"""Grouping of rows into batches: bounded padding, in as few groups as possible."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.caches.grouping import (
    RATIO_JOINED,
    RATIO_MAX,
    columns_for,
    is_fine,
    partition,
    place,
    ratio,
)

lengths = st.lists(st.one_of(st.integers(1, 4000), st.sampled_from([1, 256, 257, 32768])), max_size=9)


def by_length(numbers: list[int], groups: list[list[int]]) -> list[list[int]]:
    return [[numbers[row] for row in group] for group in groups]


def best_ratio(numbers: list[int], count: int) -> float:
    """Return the best ratio over all ways to split the rows, ordered by length, into `count` groups."""
    ordered = sorted(numbers)
    ratios = []
    for cuts in itertools.combinations(range(1, len(ordered)), count - 1):
        ends = [0, *cuts, len(ordered)]
        ratios.append(ratio([ordered[a:b] for a, b in itertools.pairwise(ends)]))
    return min(ratios, default=1.0)


@given(lengths, st.sampled_from([RATIO_MAX, RATIO_JOINED, 1.0]))
def test_a_partition_has_every_row_once_and_as_few_groups_as_can_be(numbers: list[int], limit: float) -> None:
    groups = partition(numbers, ratio_max=limit)
    assert sorted(row for group in groups for row in group) == list(range(len(numbers)))
    assert all(groups)
    assert ratio(by_length(numbers, groups)) <= limit
    if len(groups) > 1:
        assert best_ratio(numbers, len(groups) - 1) > limit
        assert ratio(by_length(numbers, groups)) <= best_ratio(numbers, len(groups)) + 1e-9


@given(lengths)
def test_rows_placed_one_by_one_stay_within_bounds(numbers: list[int]) -> None:
    groups: list[list[int]] = []
    for number in numbers:
        index = place(groups, number)
        if index == len(groups):
            groups.append([])
        groups[index].append(number)
        assert ratio(groups) <= RATIO_MAX


@given(lengths, st.integers(0, 10**5))
def test_slack_makes_groups_fewer_and_bounds_their_padding(numbers: list[int], slack: int) -> None:
    groups = partition(numbers, slack)
    assert len(groups) <= len(partition(numbers))
    alone = sum(map(columns_for, numbers))
    padding = (ratio(by_length(numbers, groups)) - 1) * alone
    assert padding <= max((RATIO_MAX - 1) * alone, slack) + 1e-6
    assert is_fine(by_length(numbers, groups), slack)
