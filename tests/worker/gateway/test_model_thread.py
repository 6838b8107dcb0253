"""The model thread: its reports while it starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from protocol.messages import Ready
from protocol.settings.worker import WorkerSettings
from tests.scripted_worker.loader import FakeLoader
from tests.system import eventually
from worker.gateway.model_thread import ModelThread
from worker.gateway.outbox import Outbox
from worker.process.startup_timer import StartupTimer


@contextlib.contextmanager
def loaded(timer: StartupTimer) -> Iterator[list[object]]:
    """Return the reports of a thread that has loaded its model."""
    outbox = Outbox()
    thread = ModelThread(FakeLoader("fake"), WorkerSettings(), "incarnation", outbox, timer=timer)
    assert not thread.is_loaded
    thread.start()
    try:
        eventually(lambda: thread.is_loaded, within_s=30)
        yield list(outbox.take(100))
    finally:
        thread.stop()
        thread.join(30)
        assert thread.pool is not None
        thread.pool.close()
        outbox.close()


def test_startup_times_are_logged_and_reported_in_ready(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter([0.0, 1.5, 4.0, 4.25])
    timer = StartupTimer(lambda: next(clock))
    timer.lap("start")
    with caplog.at_level(logging.INFO), loaded(timer) as told:
        [ready] = [message for message in told if isinstance(message, Ready)]
        assert ready.start_s == {"start": 1.5, "preparers": 2.5, "prefixes": 0.25}
    assert "ready in 4.25 s: start 1.50, preparers 2.50, prefixes 0.25" in caplog.messages
