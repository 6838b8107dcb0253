"""How long an idle worker waits for others, without a loop."""

from __future__ import annotations

from worker.schedule.admission import WINDOW_ALONE_S, WINDOW_RESUMED_S, AdmissionWindow


def test_one_that_is_resumed_waits_for_all_the_others_of_its_worker() -> None:
    window = AdmissionWindow(0.005)
    window.arrived(10.0, resumed=True)
    assert window.open(10.0) == WINDOW_RESUMED_S
    window.arrived(20.0)
    assert window.open(20.0) == WINDOW_ALONE_S


def test_a_longer_window_stays_as_long_and_none_stays_none() -> None:
    for window_s in (0.0, 1.0):
        window = AdmissionWindow(window_s)
        window.arrived(10.0, resumed=True)
        assert window.open(10.0) == window_s
