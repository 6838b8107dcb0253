"""The arithmetic of the benchmarks."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.timing import Work, alternate, compare, fit_slope, median_rate, percentile


@pytest.mark.parametrize(
    ("names", "rounds", "turns", "order"), [("abc", 2, 1, "abc bca cab"), ("ab", 1, 3, "abbaab baabba")]
)
def test_sides_take_turns_which_are_summed_and_the_first_round_is_left_out(
    names: str, rounds: int, turns: int, order: str
) -> None:
    calls: list[str] = []

    def measure(name: str) -> Work:
        calls.append(name)
        return Work(len(calls), 0.5)

    done = alternate({name: partial(measure, name) for name in names}, rounds=rounds, turns=turns)
    assert "".join(calls) == order.replace(" ", "")
    warm = len(names) * turns
    for name in names:
        numbers = [number for number, call in enumerate(calls, 1) if call == name and number > warm]
        of_rounds = [numbers[at : at + turns] for at in range(0, len(numbers), turns)]
        assert done[name] == [Work(sum(each), 0.5 * turns) for each in of_rounds]


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine's speed halves in each round; this side is always faster by a quarter.
    theirs = [Work(100, 1.0), Work(100, 2.0), Work(100, 4.0)]
    ours = [Work(125, 1.0), Work(125, 2.0), Work(130, 4.0)]
    ratio = compare(ours, theirs)
    assert (ratio.median, ratio.least, ratio.most) == (1.25, 1.25, 1.3)
    assert str(ratio) == "1.25 (1.25-1.30)"
    assert median_rate(ours) == 62.5


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_the_least_value_that_is_reached_by_as_many_as_it_says(
    values: list[float], percent: float
) -> None:
    found, needed = percentile(values, percent), len(values) * percent / 100
    reaching = [value for value in values if sum(each <= value for each in values) >= needed]
    assert found == min(reaching)


def test_the_interval_covers_the_truth_about_as_often_as_it_claims() -> None:
    sampling = random.Random(2)
    xs = [float(number) for number in range(100)]
    slopes = [fit_slope(xs, [x + sampling.gauss(0, 1) for x in xs]) for _ in range(400)]
    assert 360 <= sum(abs(slope.rise - 1) <= slope.margin for slope in slopes) <= 396
    with pytest.raises(ValueError, match="9 samples"):
        fit_slope([0.0] * 9, [0.0] * 9)
