"""Streams that are read on: by their id from an event on, and by a conversation from a byte on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import StepOutputs
from tests.broker.application import BODIES, CHAT, MESSAGES, RESPONSES, TEXT, House, house_with_worker
from tests.broker.asgi import Exchange, run, until
from tests.factories import accepted, delta, events, finished

ANN, BOB = "key-of-ann", "key-of-bob"
KEEPALIVE = b": keep-alive\n\n"


def begun(house: House, path: str = CHAT, conversation: str = "c", key: str = "", **body: object) -> Exchange:
    """Begin a stream of a conversation. `key`: the API key."""
    headers = [(b"x-conversation-id", conversation.encode())] if conversation else []
    headers += [(b"x-api-key", key.encode())] if key else []
    asked = BODIES[path] | {"stream": True} | body
    return Exchange(house.app, "POST", path, json.dumps(asked).encode(), headers=headers)


async def lost(house: House, exchange: Exchange, *texts: str) -> str:
    """Let a stream's client get these texts and leave. Return the id of its request."""
    id = await house.arrived(len(house.requests()) + 1)
    house.begin(id, *texts)
    await exchange.holds(texts[-1].encode())
    exchange.leave()
    await exchange.end()
    return id


def id_of(exchange: Exchange) -> str:
    first = exchange.documents[0]
    return str(first.get("id") or first["message"]["id"])


def parts(body: bytes) -> list[bytes]:
    """Return the events of a stream without keepalives, which clients do not see."""
    found = [each + b"\n\n" for each in body.split(b"\n\n")[:-1]]
    return [each for each in found if not each.startswith((b":", b"event: ping"))]


async def lookup(house: House, *ids: str, **headers: str) -> Any:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    body = json.dumps({"conversation_ids": ids}).encode()
    return (await Exchange(house.app, "POST", "/v1/streams/lookup", body, headers=given).end()).json


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES])
async def test_a_lost_stream_is_read_on_by_two_readers_behind_any_event(path: str, roomy: House) -> None:
    exchange = roomy.keyed(path, "k", **BODIES[path] | {"stream": True})
    id = await lost(roomy, exchange, "all ", "ab", "oa")
    had = parts(exchange.body)
    url = f"{path}/{id_of(exchange)}/stream"
    rest, whole = roomy.get(f"{url}?starting_after={len(had)}"), roomy.get(url)
    await whole.holds(b"oa")
    roomy.line.say("w", events("w", id, "rd", first=3), finished("w", id, 4))
    await rest.end()
    assert (rest.status, rest.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert had + parts(rest.body) == parts((await whole.end()).body)
    for number in (0, 1, len(had) + 1, 99):
        later = await roomy.get(f"{url}?starting_after={number}").end()
        assert parts(later.body) == parts(whole.body)[number:]
    assert len(roomy.requests()) == 1


async def test_only_streams_whose_requests_ask_for_it_are_kept(roomy: House) -> None:
    plain = begun(roomy, conversation="")
    id = await lost(roomy, plain, "x")
    assert roomy.cancels() == [id]
    whole = await roomy.serve(roomy.keyed(CHAT, "k", **BODIES[CHAT]), "x")
    background = (await roomy.respond(background=True).end()).json["id"]
    for name in (id_of(plain), whole.json["id"], background):
        refused = await roomy.get(f"{CHAT}/{name}/stream").refusal()
        assert refused == (404, "response_not_found", "id")
    begun(roomy, stream=False)
    begun(roomy, RESPONSES)
    assert await lookup(roomy, "c") == []


async def test_what_is_not_there_for_this_client_is_named() -> None:
    house = house_with_worker(api_keys=(ANN, BOB), reattach_window_s=0.001)
    exchange = begun(house, key=ANN)
    id = await lost(house, exchange, "x")
    url, mine, other = f"{CHAT}/{id_of(exchange)}/stream", {"x_api_key": ANN}, {"x_api_key": BOB}
    missing = (404, "response_not_found", "id")
    for path in (url, "/v1/stream/c", "/v1/stream?conv_id=c", f"{RESPONSES}/{id_of(exchange)}?stream=true"):
        refused = await house.get(path, **other).refusal()
        assert refused[:2] == missing[:2]
    assert (await house.get("/v1/stream/c", "DELETE", **other).end()).status == 204
    assert await lookup(house, "c", **other) == []
    assert (await house.get(f"{RESPONSES}/{id_of(exchange)}?stream=true", **mine).end()).status == 404
    for param, path in (("starting_after", url), ("from", "/v1/stream/c")):
        for wrong in ("-1", "x", "1" * 10, "²"):
            refused = await house.get(f"{path}?{param}={wrong}", **mine).refusal()
            assert refused == (400, "invalid_request", param)
    assert await house.get("/v1/stream", **mine).refusal() == (400, "invalid_request", "conv_id")
    named = (400, "invalid_request", "X-Conversation-Id")
    assert await begun(house, conversation="c" * 256, key=ANN).refusal() == named
    # Nobody has come back within the window.
    await until(lambda: house.gateway.answers.sweep() or not len(house.line.dispatcher.flights))
    assert house.cancels() == [id]
    for path in (url, "/v1/stream/c"):
        assert await house.get(path, **mine).refusal() == missing
    anthropics = await house.get(f"{MESSAGES}/msg_1/stream", **mine).end()
    assert anthropics.json["error"]["type"] == "not_found_error"


async def test_a_conversation_is_read_on_from_any_byte_and_keepalives_count() -> None:
    house = house_with_worker(keepalive_s=0.01)
    name = "c::org/model"
    exchange = begun(house, conversation=name)
    id = await house.arrived()
    house.begin(id, "all ")
    await exchange.holds(KEEPALIVE)
    exchange.leave()
    await exchange.end()
    [running] = await lookup(house, "c", "d")
    assert (running["conversation_id"], running["is_done"], running["completed_at"]) == (name, False, 0)
    readers = [house.get(f"/v1/stream/{name}?from={len(exchange.body) - back}") for back in (0, 1)]
    readers.append(house.get(f"/v1/stream?conv_id={name}&from="))
    await readers[2].holds(b"all ")
    house.line.say("w", events("w", id, "aboard", first=1), finished("w", id, 2))
    rest, longer, whole = [(await reader.end()).body for reader in readers]
    assert rest.endswith(b"data: [DONE]\n\n")
    assert exchange.body + rest == exchange.body[:-1] + longer == whole
    assert KEEPALIVE in exchange.body
    [over] = await lookup(house, name)
    assert (over["is_done"], over["total_bytes"]) == (True, len(whole))
    assert over["started_at"] <= over["completed_at"] <= over["started_at"] + 60
    assert parts((await house.get(f"{CHAT}/{id_of(exchange)}/stream").end()).body) == parts(whole)


async def test_a_conversation_has_one_stream_which_its_client_can_end(roomy: House) -> None:
    first = await lost(roomy, begun(roomy), "x")
    second = begun(roomy)
    await until(roomy.cancels)  # nobody reads the first one
    # One that is being read goes on: perhaps two requests of a conversation run side by side.
    third = begun(roomy)
    await roomy.arrived(3)
    roomy.begin(roomy.requests()[1].id, "second")
    roomy.line.say("w", finished("w", roomy.requests()[1].id, 1))
    assert (await second.end()).body.endswith(b"data: [DONE]\n\n")
    roomy.begin(roomy.requests()[2].id, "third")
    await third.holds(b"third")
    [listed] = await lookup(roomy, "c")
    assert not listed["is_done"]
    for _ in range(2):
        assert (await roomy.get("/v1/stream/c", "DELETE").end()).status == 204
    assert not (await third.end()).body.endswith(b"data: [DONE]\n\n")
    assert roomy.cancels() == [first, roomy.requests()[2].id]
    assert (await roomy.get("/v1/stream/c").end()).status == 404


async def test_a_stream_that_is_refused_leaves_nothing_behind(house: House) -> None:
    assert await begun(house, temperature=9).refusal() == (400, "invalid_request", "temperature")
    for _ in range(2):
        begun(house, conversation="")
    await house.arrived()
    assert (await begun(house).end()).status == 503
    assert len(house.gateway.answers) == 0


def test_the_next_gateway_counts_the_same_events_and_bytes(tmp_path: Path) -> None:
    had: list[Exchange] = []

    async def first(house: House) -> None:
        house.line.serving("w", "org/model", rows=8)
        exchange = begun(house)
        id = await house.arrived()
        house.begin(id, "all ")
        await exchange.holds(b"all ")
        count = exchange.body.count(KEEPALIVE)
        await until(lambda: exchange.body.count(KEEPALIVE) > count)
        house.line.say("w", events("w", id, "ab", first=1))
        await exchange.holds(b"ab")
        exchange.leave()
        had.append(await exchange.end())

    async def second(house: House) -> None:
        house.line.serving("w", "org/model", rows=8)
        url = f"{CHAT}/{id_of(had[0])}/stream?starting_after={len(parts(had[0].body))}"
        by_id, by_byte = house.get(url), house.get(f"/v1/stream/c?from={len(had[0].body)}")
        id = await house.arrived()
        assert house.requests()[0].resume == [0, 0]
        more = StepOutputs(incarnation="w", deltas=[delta("oard", id, tokens=[0])])
        house.line.say("w", accepted("w", id), more, finished("w", id, 3))
        whole = (await house.get("/v1/stream/c").end()).body
        assert had[0].body + (await by_byte.end()).body == whole
        assert parts(had[0].body) + parts((await by_id.end()).body) == parts(whole)
        assert whole.count(b'"oard"') == 1

    for talk in (first, second):
        house = House(journal=tmp_path, keepalive_s=0.02)
        run(_life(house, talk))


async def _life(house: House, talk: Any) -> None:
    house.recover()
    try:
        await talk(house)
    finally:
        house.die()
