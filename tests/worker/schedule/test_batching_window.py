"""Batching window: how long an idle worker waits for more requests, without a loop."""

from __future__ import annotations

from worker.schedule.batching_window import WINDOW_ALONE_S, WINDOW_RESUMED_S, BatchingWindow


def test_resumed_request_opens_a_longer_batching_window() -> None:
    window = BatchingWindow(0.005)
    window.arrived(10.0, resumed=True)
    assert window.open(10.0) == WINDOW_RESUMED_S
    window.arrived(20.0)
    assert window.open(20.0) == WINDOW_ALONE_S


def test_a_longer_window_stays_as_long_and_none_stays_none() -> None:
    for window_s in (0.0, 1.0):
        window = BatchingWindow(window_s)
        window.arrived(10.0, resumed=True)
        assert window.open(10.0) == window_s
