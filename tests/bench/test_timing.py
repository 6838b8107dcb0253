"""The arithmetic of the benchmarks."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.timing import Work, alternate, compare, fit_slope, median_rate, percentile


def test_sides_take_turns_and_the_first_round_is_left_out() -> None:
    calls: list[str] = []

    def measure(name: str) -> Work:
        calls.append(name)
        return Work(len(calls), 1.0)

    done = alternate({name: partial(measure, name) for name in "abc"}, rounds=2)
    assert calls == [*"abc", *"bca", *"cab"]
    assert done == {
        "a": [Work(6, 1.0), Work(8, 1.0)],
        "b": [Work(4, 1.0), Work(9, 1.0)],
        "c": [Work(5, 1.0), Work(7, 1.0)],
    }


def test_the_turns_of_a_round_are_summed() -> None:
    calls: list[str] = []

    def measure(name: str) -> Work:
        calls.append(name)
        return Work(3, 0.5)

    done = alternate({name: partial(measure, name) for name in "ab"}, rounds=1, turns=3)
    assert "".join(calls) == "abbaab" + "baabba"
    assert done == {"a": [Work(9, 1.5)], "b": [Work(9, 1.5)]}


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine's speed halves in each round; this side is always faster by a quarter.
    theirs = [Work(100, 1.0), Work(100, 2.0), Work(100, 4.0)]
    ours = [Work(125, 1.0), Work(125, 2.0), Work(130, 4.0)]
    ratio = compare(ours, theirs)
    assert (ratio.median, ratio.least, ratio.most) == (1.25, 1.25, 1.3)
    assert str(ratio) == "1.25 (1.25-1.30)"
    assert median_rate(ours) == 62.5


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)]
)
def test_a_percentile_is_one_of_the_values(percent: float, expected: float) -> None:
    values = [float(value) for value in range(1, 101)]
    random.Random(0).shuffle(values)
    assert percentile(values, percent) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_reached_by_as_many_as_it_says(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100 - 1e-6


@given(st.floats(-1e3, 1e3), st.floats(-1e6, 1e6), st.integers(10, 200))
def test_the_slope_of_a_straight_line_is_its_rise(rise: float, start: float, samples: int) -> None:
    xs = [20.0 * number for number in range(samples)]
    slope = fit_slope(xs, [start + rise * x for x in xs])
    assert slope.rise == pytest.approx(rise, rel=1e-6, abs=1e-5)
    assert slope.margin < 1e-3


def test_a_slope_that_is_there_is_told_from_noise() -> None:
    sampling = random.Random(1)
    xs = [float(number) for number in range(500)]
    noise = [sampling.gauss(0, 30) for _ in xs]
    flat, rising = fit_slope(xs, noise), fit_slope(xs, [2 * x + y for x, y in zip(xs, noise, strict=True)])
    assert abs(flat.rise) <= flat.margin
    assert rising.rise - rising.margin > 0


def test_the_interval_covers_the_truth_about_as_often_as_it_claims() -> None:
    sampling = random.Random(2)
    xs = [float(number) for number in range(100)]
    slopes = [fit_slope(xs, [sampling.gauss(0, 1) for _ in xs]) for _ in range(400)]
    covered = sum(abs(slope.rise) <= slope.margin for slope in slopes)
    assert 360 <= covered <= 396


def test_a_slope_needs_ten_samples() -> None:
    with pytest.raises(ValueError, match="9 samples"):
        fit_slope([0.0] * 9, [0.0] * 9)
