"""Watchdog of a blocked event loop."""

from __future__ import annotations

import queue

from broker.http.loop_watchdog import POLLS_MAX, LoopWatchdog

WAIT_S = 10.0
POLL_S = 0.001


def test_a_loop_without_a_sign_of_life_is_told_once() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    watchdog = LoopWatchdog(told.put, POLL_S)
    watchdog.start()
    assert told.get(timeout=WAIT_S) == f"the event loop has not run for {POLLS_MAX * POLL_S:g} s"
    watchdog.close()
    assert told.empty()
