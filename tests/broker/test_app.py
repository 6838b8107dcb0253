"""Lifespan of the application."""

from __future__ import annotations

import queue
from typing import cast
from unittest import mock

import pytest

from broker import app as app_module
from broker.dispatch.fleet import HealthState
from broker.server.server import LoopWatchdog
from broker.transport.keep_awake import SleepInhibitor
from broker.transport.router import RouterLink
from tests.broker.application import House
from tests.broker.asgi import lifespan, until
from tests.broker.dispatcher_line import SILENT_S
from tests.factories import request


async def test_the_line_is_open_for_as_long_as_the_application_runs(house: House) -> None:
    async with lifespan(house.app):
        dispatcher = house.line.dispatcher
        assert house.link.touch == [dispatcher.on_message, dispatcher.lost]
        assert not house.link.closed
        assert (await house.get("/health").end()).status == 200
    assert house.link.closed


async def test_a_loop_that_stands_still_is_noticed_and_one_that_runs_is_not(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "SWEEP_S", 0.001)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(app_module, "LoopWatchdog", lambda: LoopWatchdog(told.put, 0.05))
    asked: list[float] = []
    monkeypatch.setattr(house.line.dispatcher, "sweep", lambda: asked.append(0.0))
    async with lifespan(house.app):
        await until(lambda: len(asked) > 200)
        assert told.empty()
        assert "has not run" in told.get(timeout=10.0)  # this blocks the loop


async def test_workers_that_hang_are_found_although_a_sweep_failed(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "SWEEP_S", 0.005)
    dispatcher = house.line.dispatcher
    [worker] = dispatcher.fleet
    sweep, failures = dispatcher.sweep, [ValueError("scripted")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()
        sweep()

    monkeypatch.setattr(dispatcher, "sweep", fail_once)
    async with lifespan(house.app):
        house.line.clock.now += SILENT_S + 1
        await until(lambda: worker.verdict is HealthState.SILENT)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]


async def test_the_machine_is_kept_awake_while_there_are_requests(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "SWEEP_S", 0.005)
    inhibitor = mock.create_autospec(SleepInhibitor, instance=True)
    app = app_module.create_app(house.gateway, cast(RouterLink, house.link), None, inhibitor)
    async with lifespan(app):
        await until(lambda: inhibitor.keep.called)
        inhibitor.keep.assert_called_once_with(False)
        house.line.dispatcher.flights.open(request("a"), "org/model", house.line.clock.now)
        await until(lambda: inhibitor.keep.mock_calls[-1] == mock.call(True))
        inhibitor.close.assert_not_called()
    inhibitor.close.assert_called_once()
