"""Histogram with fixed bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch.traffic import Histogram

BOUNDS = (0.1, 1.0, 5.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
def test_each_bound_has_all_that_is_no_greater(observed: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, times in observed:
        histogram.observe(value, times)
    values = [value for value, times in observed for _ in range(times)]
    assert histogram.cumulative() == [
        *(sum(value <= bound for value in values) for bound in BOUNDS),
        len(values),
    ]
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))
