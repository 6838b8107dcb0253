"""The application, from its start to its end."""

from __future__ import annotations

from typing import cast

import pytest

from broker import app as app_module
from broker.dispatch.fleet import Verdict
from broker.line.caffeine import Caffeine
from broker.line.link import Link
from tests.broker.asgi import lifespan, run, until
from tests.broker.dispatching import SILENT_S, request
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


def test_the_machine_is_kept_awake_while_there_are_requests(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "SWEEP_S", 0.005)

    class Told:
        """In the place of a program of the system's."""

        def __init__(self) -> None:
            self.kept: list[bool] = []
            self.closed = False

        def keep(self, awake: bool) -> None:
            self.kept.append(awake)

        def close(self) -> None:
            self.closed = True

    told = Told()
    app = app_module.create_app(house.gateway, cast(Link, house.link), None, cast(Caffeine, told))

    async def talk() -> None:
        async with lifespan(app):
            await until(lambda: told.kept)
            assert told.kept == [False]
            flights = house.line.dispatcher.flights
            flights.open(request("a"), "org/model", house.line.clock.now)
            await until(lambda: told.kept[-1])
            assert not told.closed

    run(talk())
    assert told.closed
