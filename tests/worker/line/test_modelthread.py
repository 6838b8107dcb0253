"""The model thread: what it tells of its start."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from protocol.messages import Ready
from protocol.workersettings import WorkerSettings
from tests.system import eventually
from worker.fake.loader import FakeLoader
from worker.laps import Laps
from worker.line.modelthread import ModelThread
from worker.line.outbox import Outbox


@contextlib.contextmanager
def loaded(laps: Laps) -> Iterator[list[object]]:
    """What a thread that has loaded its model has told."""
    outbox = Outbox()
    thread = ModelThread(FakeLoader("fake"), WorkerSettings(), "incarnation", outbox, laps=laps)
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


def test_what_its_start_took_is_told_in_the_log_and_with_ready(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter([0.0, 1.5, 4.0, 4.25])
    laps = Laps(lambda: next(clock))
    laps.lap("start")
    with caplog.at_level(logging.INFO), loaded(laps) as told:
        [ready] = [message for message in told if isinstance(message, Ready)]
        assert ready.start_s == {"start": 1.5, "preparers": 2.5, "prefixes": 0.25}
    assert "ready in 4.25 s: start 1.50, preparers 2.50, prefixes 0.25" in caplog.messages
