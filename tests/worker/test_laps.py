"""What each part of a start took."""

from __future__ import annotations

from worker.laps import Laps


def test_the_time_between_two_laps_is_the_seconds_own_and_equal_names_add_up() -> None:
    clock = iter([10.0, 11.0, 11.5, 14.0])
    laps = Laps(lambda: next(clock))
    laps.lap("imports")
    laps.lap("weights")
    laps.lap("imports")
    assert laps.seconds == {"imports": 3.5, "weights": 0.5}
    assert laps.total_s == 4.0
    assert str(laps) == "imports 3.50, weights 0.50"


def test_they_are_told_to_milliseconds() -> None:
    clock = iter([0.0, 0.12345])
    laps = Laps(lambda: next(clock))
    laps.lap("trial")
    assert laps.rounded() == {"trial": 0.123}
