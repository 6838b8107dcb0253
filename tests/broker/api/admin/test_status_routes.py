"""GET /v1/status."""

from __future__ import annotations

from typing import Any

from broker.dispatch.traffic import PATH_CHARS_MAX
from broker.requests.status_streams import WATCHERS_MAX
from protocol.types import RequestStatus
from tests.broker.application import House
from tests.broker.asgi import until
from tests.factories import accepted, events, reused


def tick(house: House, seconds: int) -> None:
    for _ in range(seconds):
        house.line.clock.now += 1.0
        house.line.dispatcher.history.tick(house.line.clock.now)


async def test_the_status_has_the_last_minutes_unless_nobody_wants_them(house: House) -> None:
    tick(house, 3)
    history = (await house.get("/v1/status").end()).json["history"]
    assert history["every_s"] == 1.0
    assert [len(row) for row in history["rows"]] == [len(history["columns"])] * 2
    assert "history" not in (await house.get("/v1/status?history=false").end()).json


async def test_a_stream_tells_the_last_minutes_once_and_then_what_is_new() -> None:
    house = House()
    tick(house, 3)
    listening = house.get("/v1/status/stream")
    await listening.holds(b"\n\n")
    tick(house, 1)
    await until(lambda: listening.body.count(b"\n\n") >= 2)
    assert listening.headers["content-type"].startswith("text/event-stream")
    assert [len(document["history"]["rows"]) for document in listening.documents] == [2, 1]
    assert len(house.gateway.watchers) == 1
    listening.leave()
    await listening.end()
    assert not house.gateway.watchers


async def test_a_stream_ends_when_the_gateway_stops_and_many_are_too_many(house: House) -> None:
    listening = house.get("/v1/status/stream")
    await listening.holds(b"\n\n")
    house.gateway.watchers.update(object() for _ in range(WATCHERS_MAX - 1))
    assert await house.get("/v1/status/stream").refusal() == (503, "too_many_connections", None)
    house.line.dispatcher.stop()
    await listening.end()
    assert listening.complete


async def test_requests_are_told_wherever_they_stand(house: House) -> None:
    asked = house.chat("secret", stream=True)
    await until(lambda: house.line.dispatcher.flights)
    [flight] = house.line.dispatcher.flights
    await until(lambda: flight.attempt)

    async def told() -> dict[str, Any]:
        [request] = (await house.get("/v1/status").end()).json["requests"]
        return dict(request)

    assert (await told())["phase"] == "preparing"
    house.line.say("w", accepted("w", flight.id))
    assert ((await told())["phase"], (await told())["prompt_tokens"]) == ("waiting", 3)
    row = RequestStatus(id=flight.id, phase="prefill", prompt_tokens=3, prefilled=2, preemptions=1)
    house.line.beat("w", running=1, steps=1, rows=[row])
    prefilling = await told()
    assert (prefilling["phase"], prefilling["prefilled"], prefilling["preemptions"]) == ("prefill", 2, 1)
    house.line.say("w", reused("w", flight.id, 2, "disk", "diverged"), events("w", flight.id, "a", "b"))
    decoding = await told()
    assert (decoding["phase"], decoding["prefilled"], decoding["answered"]) == ("decode", 3, 2)
    assert decoding["reuse"] == {"tokens": 2, "tier": "disk", "miss": "diverged"}
    assert decoding["time_to_first_token_s"] is not None
    house.line.dispatcher.lost("w")
    assert ((await told())["phase"], (await told())["worker"]) == ("queued", None)
    house.line.serving("w2", "org/model")
    house.line.say("w2", accepted("w2", f"{flight.id}~2"))
    resumed = await told()
    assert (resumed["resumes"], resumed["worker"], resumed["answered"]) == (1, "w2", 2)
    assert "secret" not in str(resumed)
    asked.leave()
    await asked.end()
    recent = (await house.get("/v1/status").end()).json["recent"]
    assert [(end["id"], end["code"]) for end in recent["ends"]] == [(flight.id, "client_left")]
    assert [event["what"] for event in recent["workers"]][:2] == ["ready", "connected"]


async def test_refusals_are_remembered_by_their_ids_and_probes_and_the_page_are_none() -> None:
    house = House(api_keys=("sesame",))
    assert (await house.get("/ready").end()).status == 503
    assert (await house.get("/v1/status/stream").end()).status == 401  # the page, which may need a key
    path = "/v1/models/secret%20model" + "x" * 300
    refused = await house.get(path, x_request_id="mine", x_api_key="sesame").end()
    assert refused.status == 404
    answer = (await house.get("/v1/status", x_api_key="sesame").end()).json
    [told] = answer["recent"]["refusals"]
    assert (told["request_id"], told["status"], told["code"]) == ("mine", 404, "model_not_found")
    assert len(told["path"]) == PATH_CHARS_MAX
    assert answer["gateway"]["responses"] == {"503": 1, "401": 1, "404": 1}
