"""The arithmetic of the benchmarks."""

from __future__ import annotations

import random

import pytest

from bench.timing import Work, compare, fit_slope, median_rate


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine's speed halves in each round; this side is always faster by a quarter.
    theirs = [Work(100, 1.0), Work(100, 2.0), Work(100, 4.0)]
    ours = [Work(125, 1.0), Work(125, 2.0), Work(130, 4.0)]
    ratio = compare(ours, theirs)
    assert (ratio.median, ratio.least, ratio.most) == (1.25, 1.25, 1.3)
    assert str(ratio) == "1.25 (1.25-1.30)"
    assert median_rate(ours) == 62.5


def test_the_interval_covers_the_truth_about_as_often_as_it_claims() -> None:
    sampling = random.Random(2)
    xs = [float(number) for number in range(100)]
    slopes = [fit_slope(xs, [x + sampling.gauss(0, 1) for x in xs]) for _ in range(400)]
    assert 360 <= sum(abs(slope.rise - 1) <= slope.margin for slope in slopes) <= 396
    with pytest.raises(ValueError, match="9 samples"):
        fit_slope([0.0] * 9, [0.0] * 9)
