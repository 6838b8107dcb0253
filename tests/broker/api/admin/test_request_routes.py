"""POST /v1/requests/ID/cancel."""

from __future__ import annotations

import pytest

from tests.broker.application import House, house_with_worker
from tests.factories import accepted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_cancelled_at_its_client_and_at_its_worker(house: House, stream: bool) -> None:
    asked = house.chat("hello", stream=stream)
    id = await house.arrived()
    house.begin(id, "one ")
    if stream:
        await asked.holds(b"one ")
    told = (await house.post(f"/v1/requests/{id}/cancel").end()).json
    assert told == {"id": id, "object": "request", "cancelled": True}
    answer = await asked.end()
    assert answer.status == (200 if stream else 499)
    assert b'"code":"request_cancelled"' in answer.body
    assert house.cancels() == [id]
    [end] = (await house.get("/v1/status").end()).json["recent"]["ends"]
    assert (end["id"], end["code"]) == (id, "request_cancelled")
    again = await house.post(f"/v1/requests/{id}/cancel").end()
    assert (again.status, again.json) == (200, told)
    assert house.cancels() == [id]
    assert await house.post("/v1/requests/chatcmpl-0/cancel").refusal() == (404, "route_not_found", "id")


async def test_a_key_cancels_only_its_own_requests() -> None:
    keyed = house_with_worker(api_keys=("sesame", "simsim"))
    asked = keyed.respond(key="sesame")
    path = f"/v1/requests/{await keyed.arrived()}/cancel"
    assert (await keyed.post(path).end()).status == 401
    assert await keyed.get(path, "POST", x_api_key="simsim").refusal() == (404, "route_not_found", "id")
    for _ in range(2):
        assert (await keyed.get(path, "POST", x_api_key="sesame").end()).status == 200
    assert (await keyed.get(path, "POST", x_api_key="simsim").end()).status == 404
    assert (await asked.end()).status == 499


async def test_the_status_names_the_key_of_a_request_and_its_phases() -> None:
    keyed = house_with_worker(api_keys=("sesame",))
    asked = keyed.respond(key="sesame")
    id = await keyed.arrived()
    keyed.line.say("w", accepted("w", id))
    status = (await keyed.get("/v1/status", x_api_key="sesame").end()).json
    [request] = status["requests"]
    assert (request["id"], request["key"]) == (id, "key 1")
    assert [phase for phase, _ in request["phases"]] == ["queued", "preparing", "waiting"]
    assert abs(status["time"] - request["time"]) < 60
    asked.leave()
    await asked.end()
    [end] = (await keyed.get("/v1/status", x_api_key="sesame").end()).json["recent"]["ends"]
    assert (end["key"], end["phases"]) == ("key 1", request["phases"])
