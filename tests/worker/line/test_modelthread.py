"""The model thread: what it tells of a load."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from protocol.messages import Loading, Ready
from protocol.workersettings import WorkerSettings
from tests.system import eventually
from worker.fake.loader import FakeLoader
from worker.laps import Laps
from worker.line import modelthread
from worker.line.modelthread import ModelThread
from worker.line.outbox import Outbox


@contextlib.contextmanager
def loaded(laps: Laps) -> Iterator[list[object]]:
    """What a thread that has loaded its model has told."""
    outbox = Outbox()
    thread = ModelThread(FakeLoader("fake"), WorkerSettings(), "incarnation", outbox, laps)
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


def test_the_log_is_told_how_far_a_load_has_come_and_not_too_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for progress_s, times in ((0.0, 10), (60.0, 0)):
        caplog.clear()
        monkeypatch.setattr(modelthread, "PROGRESS_S", progress_s)
        with caplog.at_level(logging.INFO), loaded(Laps()) as told:
            assert len([message for message in told if isinstance(message, Loading)]) == 10
        assert sum(line.startswith("loading: ") for line in caplog.messages) == times


def test_what_its_start_took_is_told_in_the_log_and_with_ready(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter([0.0, 1.5, 4.0, 4.25])
    laps = Laps(lambda: next(clock))
    laps.lap("start")
    with caplog.at_level(logging.INFO), loaded(laps) as told:
        [ready] = [message for message in told if isinstance(message, Ready)]
        assert ready.start_s == {"start": 1.5, "preparers": 2.5, "prefixes": 0.25}
    assert "ready in 4.25 s: start 1.50, preparers 2.50, prefixes 0.25" in caplog.messages
