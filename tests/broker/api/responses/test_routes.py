"""POST /v1/responses, to a worker and back, and the routes of stored responses."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.conversation import unpack
from protocol.settings.gateway import GatewaySettings
from tests.broker.application import RESPONSES, House, house_with_worker
from tests.broker.asgi import Exchange, until
from tests.factories import accepted, events, finished, reused

ANN, BOB = "key-of-ann", "key-of-bob"


async def answered(house: House, text: str = "all aboard", **fields: Any) -> Any:
    """Serve a request of the responses API, and return the response document."""
    return (await house.serve(house.respond(**fields), text)).json


async def test_a_prompt_cache_key_isolates_only_where_that_is_wanted(house: House) -> None:
    without_effect = {"mode": "implicit", "comparison_response_id": "resp_1"}
    await answered(house, prompt_cache_key="k", prompt_cache_options=without_effect)
    await answered(house, prompt_cache_key="k", prompt_cache_options={"isolated": True})
    assert [request.cache_salt for request in house.requests()] == ["", "prompt_cache_key=k;"]
    for options, param in (({"isolated": True}, "prompt_cache_key"), ({"prewarm": True}, "prewarm")):
        refused = await house.respond(prompt_cache_options=options).end()
        assert refused.status == 400
        assert param in refused.error["param"]


async def streamed(house: House, keepalives: int) -> Exchange:
    """Stream an answer with at least so many keepalives before its text and in it."""
    answer = house.respond(stream=True)
    id = await house.arrived(len(house.requests()) + 1)
    house.line.say("w", accepted("w", id), reused("w", id))
    for said in (events("w", id, "all "), events("w", id, "aboard", first=1), finished("w", id, 2)):
        writes = len(answer.sent)
        await until(lambda seen=writes: len(answer.sent) >= seen + keepalives)
        house.line.say("w", said)
    return await answer.end()


async def test_keepalives_repeat_a_number_so_that_the_others_never_depend_on_time() -> None:
    slow, fast = house_with_worker(keepalive_s=0.001), house_with_worker()
    late, soon = (await streamed(slow, 3)).numbered, (await streamed(fast, 0)).numbered
    assert [number for number, _ in soon] == list(range(len(soon)))
    assert len(late) > len(soon)
    # Codex asks again after 300 s without an event (`stream_idle_timeout_ms`), and ignores comments.
    assert GatewaySettings().keepalive_s < 300
    repeated = {at for at in range(1, len(late)) if late[at][0] == late[at - 1][0]}
    assert {late[at][1] for at in repeated} == {"response.in_progress"}
    assert [each for at, each in enumerate(late) if at not in repeated] == soon


async def test_a_conversation_goes_on_from_the_last_id(house: House) -> None:
    first = await answered(house, "one", input="1", instructions="Be terse.")
    second = await answered(house, "two", input="2", previous_response_id=first["id"])
    third = await answered(house, "three", input="3", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    assert unpack(house.requests()[-1]).messages == [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "3"},
    ]


async def test_a_response_can_be_asked_for_again_until_it_is_deleted(house: House) -> None:
    document = await answered(house)
    path = f"{RESPONSES}/{document['id']}"
    assert (await house.get(path).end()).json == document
    assert await house.get(f"{path}?stream=true").refusal() == (400, "unsupported_parameter", "stream")
    assert await house.get(f"{path}/cancel", method="POST").refusal() == (400, "invalid_request", None)
    items = (await house.get(f"{path}/input_items").end()).json
    assert items["data"][0]["content"] == [{"type": "input_text", "text": "hello"}]
    assert items["first_id"] == items["last_id"] == items["data"][0]["id"]
    deleted = (await house.get(path, method="DELETE").end()).json
    assert deleted == {"id": document["id"], "object": "response", "deleted": True}
    for exchange in (house.get(path), house.get(path, method="DELETE"), house.get(f"{path}/input_items")):
        assert await exchange.refusal() == (404, "response_not_found", None)
    again = await house.respond(previous_response_id=document["id"]).refusal()
    assert again == (400, "previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("configured", [{"responses_max": 0}, {}])
async def test_response_is_not_stored_when_storing_is_disabled(configured: dict[str, Any]) -> None:
    house = house_with_worker(**configured)
    document = await answered(house, **({} if configured else {"store": False}))
    assert document["store"] is False
    if configured:
        assert await house.respond(background=True).refusal() == (400, "unsupported_parameter", "background")
    assert (await house.get(f"{RESPONSES}/{document['id']}").end()).status == 404
    assert house.gateway.responses.changes == 0


async def test_a_key_never_sees_what_another_one_was_answered() -> None:
    house = house_with_worker(api_keys=(ANN, BOB))
    document = await answered(house, key=ANN)
    path = f"{RESPONSES}/{document['id']}"
    assert (await house.get(path, x_api_key=ANN).end()).status == 200
    for method in ("GET", "DELETE"):
        assert (await house.get(path, method, x_api_key=BOB).end()).status == 404
    assert (await house.get(f"{path}/input_items", x_api_key=BOB).end()).status == 404
    assert (await house.get(f"{path}/cancel", "POST", x_api_key=BOB).end()).status == 404
    assert (await house.respond(key=BOB, previous_response_id=document["id"]).end()).status == 400
    reference = [{"type": "item_reference", "id": document["output"][0]["id"]}]
    assert (await house.respond(reference, key=BOB).end()).status == 404
    assert (await house.get(path).end()).status == 401


async def test_a_response_that_runs_can_be_seen_and_cancelled() -> None:
    house = house_with_worker(api_keys=(ANN, BOB))
    stream = house.respond(key=ANN, stream=True)
    id = await house.arrived()
    path = f"{RESPONSES}/{id}"
    house.begin(id, "all ")
    await stream.holds(b'"delta":"all "')
    seen = (await house.get(path, x_api_key=ANN).end()).json
    assert (seen["id"], seen["status"]) == (id, "in_progress")
    assert (await house.get(f"{path}/cancel", "POST", x_api_key=BOB).end()).status == 404
    document = (await house.get(f"{path}/cancel", "POST", x_api_key=ANN).end()).json
    assert (document["status"], document["output"][0]["content"][0]["text"]) == ("cancelled", "all ")
    await stream.end()
    assert stream.complete
    last = stream.documents[-1]
    assert (last["type"], last["response"]) == ("response.incomplete", document)
    assert (await house.get(path, x_api_key=ANN).end()).json == document
    assert house.cancels()
    assert len(house.line.dispatcher.flights) == 0
