"""Liveness and readiness of the gateway."""

from __future__ import annotations

from protocol.messages import Loading
from tests.broker.application import House
from tests.broker.dispatcher_line import ready


async def test_the_gateway_is_healthy_without_any_worker() -> None:
    answer = await House().get("/health").end()
    assert (answer.status, answer.json) == (200, {"status": "ok"})


async def test_the_gateway_is_ready_as_long_as_a_worker_serves() -> None:
    house = House()
    absent = await house.get("/ready").end()
    assert (absent.status, absent.error["code"]) == (503, "worker_unavailable")
    assert int(absent.headers["retry-after"]) >= 1
    house.line.hello("w")
    house.line.dispatcher.on_message("w", Loading(incarnation="w", done=1, total=4))
    loading = await house.get("/ready").end()
    assert (loading.status, loading.error["code"]) == (503, "model_loading")
    assert "25%" in loading.error["message"]
    assert int(loading.headers["retry-after"]) >= 1
    house.line.dispatcher.on_message("w", ready("w"))
    serving = await house.get("/ready").end()
    assert (serving.status, serving.json) == (200, {"status": "ready"})
    house.line.dispatcher.lost("w")
    assert (await house.get("/ready").end()).status == 503
