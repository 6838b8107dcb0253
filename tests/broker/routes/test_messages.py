"""POST /v1/messages and /v1/messages/count_tokens, to a worker and back."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from broker.dialects.messages.answer import PING
from protocol.conversation import unpack
from protocol.types import TokenizeOptions
from tests.broker.application import MESSAGES, House
from tests.broker.asgi import Exchange, run
from tests.factories import accepted, events, failed, finished, reused
from tests.images import picture

PNG = picture()
HI = [{"role": "user", "content": "hello"}]


def error_of(answer: Exchange) -> dict[str, Any]:
    """Return the error object of a refusal, after its envelope is checked."""
    document = answer.json
    assert document.keys() == {"type", "error", "request_id"}
    assert document["type"] == "error"
    assert document["error"].keys() == {"type", "message"}
    assert document["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return dict(document["error"])


def test_a_whole_message_has_its_length_and_its_text(house: House) -> None:
    async def talk() -> None:
        answer = house.message(model="org/model", system="Be brief.")
        id = await house.arrived()
        spoken = unpack(house.requests()[0]).messages or []
        assert [message["role"] for message in spoken] == ["system", "user"]
        house.line.say("w", accepted("w", id), reused("w", id, 2))
        house.line.say("w", events("w", id, "all ", "aboard 🚂"), finished("w", id, 2, cached=2))
        document = (await answer.end()).json
        assert (document["id"], document["model"]) == (id, "org/model")
        assert document["content"] == [{"type": "text", "text": "all aboard 🚂"}]
        assert document["usage"]["cache_read_input_tokens"] == 2
        assert answer.headers["x-roundhouse-cache"] == "hit=2/3; tier=none; miss=cold"

    run(talk())
    assert len(house.line.dispatcher.flights) == 0


def test_a_stream_is_sent_as_it_comes_and_kept_alive_with_pings() -> None:
    house = House(keepalive_s=0.02)
    house.line.serving("w")

    async def talk() -> None:
        answer = house.message(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id))
        await answer.holds(PING * 3)
        assert answer.body.startswith(b"event: message_start\n")
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        house.line.say("w", events("w", id, "x"))
        await answer.holds(b'"text":"x"')
        house.line.say("w", finished("w", id, 1))
        await answer.end()
        assert answer.complete
        assert answer.body.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')

    run(talk())


async def diagnosed(house: House, text: str, previous: str | None, **fields: Any) -> tuple[str, Any]:
    """Return id and diagnostics of a message, which is the same streamed and whole."""
    found = []
    for stream in (False, True):
        sent = len(house.requests())
        said = {"diagnostics": {"previous_message_id": previous}, "stream": stream, **fields}
        answer = house.message(text, **said)
        await house.arrived(sent + 1)
        id = house.requests()[-1].id
        house.line.say("w", accepted("w", id), events("w", id, "x"), finished("w", id, 1))
        await answer.end()
        lines = [line[6:] for line in answer.body.splitlines() if line.startswith(b"data: ")]
        found.append(json.loads(lines[0])["message"] if stream else answer.json)
    assert found[0].get("diagnostics") == found[1].get("diagnostics")
    return found[0]["id"], found[0].get("diagnostics")


def test_why_a_prompt_missed_the_cache_is_told_relative_to_another_message(house: House) -> None:
    async def talk() -> None:
        first, told = await diagnosed(house, "one", None, system="Be terse.")
        assert told is None
        same = await diagnosed(house, "one", first, system="Be terse.")
        assert same[1] is None
        for fields, reason in (
            ({"system": "Be long."}, "system_changed"),
            ({"system": "Be terse.", "tools": [{"name": "get", "input_schema": {}}]}, "tools_changed"),
        ):
            _, told = await diagnosed(house, "one", first, **fields)
            assert told == {"cache_miss_reason": {"type": reason, "cache_missed_input_tokens": 3}}
        _, told = await diagnosed(house, "two", first, system="Be terse.")
        assert told["cache_miss_reason"]["type"] == "messages_changed"
        _, told = await diagnosed(house, "one", "msg_no")
        assert told == {"cache_miss_reason": {"type": "previous_message_not_found"}}

    run(talk())


def test_stream_failure_is_an_error_event_with_the_request_id(house: House) -> None:
    async def talk() -> None:
        answer = house.message(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), events("w", id, "x"))
        await answer.holds(b'"text":"x"')
        house.line.say("w", failed("w", id))
        await answer.end()
        error = json.loads(answer.body.rpartition(b"data: ")[2])
        assert error["error"]["type"] == "api_error"
        assert error["request_id"] == answer.headers["request-id"]

    run(talk())


def test_betas_and_versions_change_nothing(house: House) -> None:
    async def talk() -> None:
        body = json.dumps({"max_tokens": 4, "messages": HI}).encode()
        headers = [(b"anthropic-version", b"2023-06-01"), (b"anthropic-beta", b"a-2025-01-01,b-2026-01-01")]
        answer = Exchange(house.app, "POST", MESSAGES + "?beta=true", body, headers)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), events("w", id, "x"), finished("w", id, 1))
        assert (await answer.end()).status == 200

    run(talk())


def test_refusals_of_every_kind_have_anthropics_envelope(house: House) -> None:
    async def talk() -> None:
        wrong = await house.message(temperature=9).end()
        assert (wrong.status, error_of(wrong)["type"]) == (400, "invalid_request_error")
        assert "temperature" in error_of(wrong)["message"]
        unknown = await house.message(model="nobody").end()
        assert (unknown.status, error_of(unknown)["type"]) == (404, "not_found_error")
        method = await house.get(MESSAGES).end()
        assert (method.status, error_of(method)["type"]) == (405, "invalid_request_error")
        nothing = await house.post(MESSAGES + "/batches").end()
        assert (nothing.status, error_of(nothing)["type"]) == (404, "not_found_error")

    run(talk())


def test_a_full_house_says_so_and_when_to_come_back(house: House) -> None:
    async def talk() -> None:
        waiting = [house.message() for _ in range(2)]
        await house.arrived(2)
        refused = await house.message().end()
        assert (refused.status, error_of(refused)["type"]) == (503, "overloaded_error")
        assert int(refused.headers["retry-after"]) >= 1
        for answer in waiting:
            answer.leave()
            await answer.end()

    run(talk())


@pytest.mark.parametrize("header", [(b"x-api-key", b"rh-one"), (b"authorization", b"Bearer rh-one")])
def test_a_key_comes_in_either_header(header: tuple[bytes, bytes]) -> None:
    house = House(api_keys=("rh-one",))
    house.line.serving("w")

    async def talk() -> None:
        refused = await house.message().end()
        assert (refused.status, error_of(refused)["type"]) == (401, "authentication_error")
        body = json.dumps({"max_tokens": 4, "messages": HI}).encode()
        answer = Exchange(house.app, "POST", MESSAGES, body, [header])
        id = await house.arrived()
        house.line.say("w", accepted("w", id), events("w", id, "x"), finished("w", id, 1))
        assert (await answer.end()).status == 200

    run(talk())


def test_an_image_in_a_result_travels_behind_the_request() -> None:
    house = House()
    house.line.serving("w", images=True)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}

    async def talk() -> None:
        seen = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
        answer = house.message([seen])
        id = await house.arrived()
        assert [media.mime for media in house.requests()[0].media] == ["image/png"]
        assert house.line.media[id] == [PNG]
        house.line.say("w", accepted("w", id), events("w", id, "x"), finished("w", id, 1))
        assert (await answer.end()).status == 200

    run(talk())


def test_an_image_that_is_none_is_named_as_the_client_knows_it() -> None:
    house = House()
    house.line.serving("w", images=True)

    async def talk() -> None:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        refused = await house.message([{"type": "text", "text": "?"}, image]).end()
        assert refused.status == 400
        assert error_of(refused)["message"].startswith("messages[0].content[1]: not an image")

    run(talk())


def test_tokens_are_counted_without_a_run_and_say_nothing_of_caches(house: House) -> None:
    async def talk() -> None:
        answer = house.post(MESSAGES + "/count_tokens", model="org/model", messages=HI, system="S")
        id = await house.arrived()
        assert house.requests()[0].tokenizing == TokenizeOptions()
        house.line.say("w", accepted("w", id, prompt_tokens=12), finished("w", id))
        assert (await answer.end()).json == {"input_tokens": 12}
        assert "x-roundhouse-cache" not in answer.headers

    run(talk())
    assert len(house.line.dispatcher.flights) == 0


def test_invalid_count_tokens_request_is_refused(house: House) -> None:
    async def talk() -> None:
        empty = await house.post(MESSAGES + "/count_tokens", messages=[]).end()
        assert (empty.status, error_of(empty)["type"]) == (400, "invalid_request_error")
        answer = house.post(MESSAGES + "/count_tokens", messages=HI)
        house.line.say("w", failed("w", await house.arrived(), "invalid_request"))
        assert (await answer.end()).status == 400

    run(talk())


def test_head_of_root_returns_200(house: House) -> None:
    async def talk() -> None:
        answer = await house.get("/", "HEAD").end()
        assert answer.status == 200  # the server drops the body
        assert answer.headers["request-id"]

    run(talk())
