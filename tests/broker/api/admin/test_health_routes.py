"""Liveness and readiness of the gateway."""

from __future__ import annotations

from protocol.messages import Loading
from tests.broker.application import House
from tests.broker.dispatcher_line import ready


async def test_the_gateway_is_healthy_without_a_worker_and_ready_as_long_as_one_serves() -> None:
    house = House()
    healthy = await house.get("/health").end()
    assert (healthy.status, healthy.json) == (200, {"status": "ok"})
    absent = house.get("/ready")
    assert await absent.refusal() == (503, "worker_unavailable", None)
    assert int(absent.headers["retry-after"]) >= 1
    house.line.hello("w")
    house.line.say("w", Loading(incarnation="w", done=1, total=4))
    loading = house.get("/ready")
    assert await loading.refusal() == (503, "model_loading", None)
    assert "25%" in loading.error["message"]
    assert int(loading.headers["retry-after"]) >= 1
    house.line.say("w", ready("w"))
    serving = await house.get("/ready").end()
    assert (serving.status, serving.json) == (200, {"status": "ready"})
    house.line.dispatcher.lost("w")
    assert (await house.get("/ready").end()).status == 503
