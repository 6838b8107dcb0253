"""The application, from its start to its end."""

from __future__ import annotations

import pytest

from broker import app as app_module
from broker.dispatch.fleet import Verdict
from tests.broker.asgi import lifespan, run, until
from tests.broker.dispatching import SILENT_S
from tests.broker.house import House


def test_the_line_is_open_for_as_long_as_the_application_runs(house: House) -> None:
    async def talk() -> None:
        async with lifespan(house.app):
            dispatcher = house.line.dispatcher
            assert house.link.heard == [dispatcher.hear, dispatcher.lost, dispatcher.turn_away]
            assert not house.link.closed
            assert (await house.get("/health").end()).status == 200
        assert house.link.closed

    run(talk())


def test_workers_that_hang_are_found_while_nobody_asks(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "SWEEP_S", 0.005)
    [worker] = house.line.dispatcher.fleet

    async def talk() -> None:
        async with lifespan(house.app):
            house.line.clock.now += SILENT_S + 1
            await until(lambda: worker.verdict is Verdict.SILENT)

    run(talk())
