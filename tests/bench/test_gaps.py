"""Which gaps between tokens count as pauses."""

from __future__ import annotations

from bench.gaps import gaps

TIMES = [0.0, 1.0, 2.0, 4.0, 8.0, 9.0]


def test_a_gap_counts_whole_when_any_of_it_lies_in_the_span() -> None:
    assert gaps(TIMES, 1.5, 4.5) == [1.0, 2.0, 4.0]


def test_a_gap_that_outlasts_the_span_counts() -> None:
    assert gaps(TIMES, 5.0, 6.0) == [4.0]


def test_gaps_that_only_touch_the_span_do_not_count() -> None:
    assert gaps(TIMES, 2.0, 4.0) == [2.0]


def test_gaps_outside_the_stream_are_ignored() -> None:
    assert gaps(TIMES, 9.0, 20.0) == []
    assert gaps([], 0.0, 1.0) == []
