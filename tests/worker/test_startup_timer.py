"""Durations of the phases of a start."""

from __future__ import annotations

from worker.startup_timer import StartupTimer


def test_the_time_between_two_laps_is_the_seconds_own_and_equal_names_add_up() -> None:
    clock = iter([10.0, 11.0, 11.5, 14.0])
    timer = StartupTimer(lambda: next(clock))
    timer.lap("imports")
    timer.lap("weights")
    timer.lap("imports")
    assert timer.seconds == {"imports": 3.5, "weights": 0.5}
    assert timer.total_s == 4.0
