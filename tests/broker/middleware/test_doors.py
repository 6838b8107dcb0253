"""Checks before dispatch, in process: API keys, per-key concurrency, body budget, queue."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.settings.gateway import GatewaySettings
from tests.broker.application import CHAT, House
from tests.broker.asgi import Exchange, until
from tests.factories import accepted, events, finished, reused

KEY, OTHER = "rh-one", "rh-two"
PAGE = "https://page.example"


class Doors(House):
    """Application with API keys, whose workers are played by the test."""

    def __init__(self, *, waiting_max: int = 8, **configured: Any) -> None:
        super().__init__(api_keys=(KEY, OTHER), waiting_max=waiting_max, **configured)
        self.line.serving("w", rows=1)

    def ask(self, key: str | None = KEY, *, filler: int = 0, **fields: object) -> Exchange:
        body = {"messages": [{"role": "user", "content": "x" * filler}], **fields}
        headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        return Exchange(self.app, "POST", CHAT, json.dumps(body).encode(), headers)

    async def finish(self, *exchanges: Exchange) -> None:
        for request in self.requests():
            self.line.say(
                "w", accepted("w", request.id), events("w", request.id, "x"), finished("w", request.id)
            )
        for exchange in exchanges:
            assert (await exchange.end()).status == 200


def empty(doors: Doors) -> bool:
    return len(doors.line.dispatcher.flights) == len(doors.gateway.key_concurrency) == 0


async def test_without_a_key_nothing_reaches_a_worker_and_the_body_is_not_read() -> None:
    doors = Doors()
    for key in (None, "wrong"):
        answer = doors.ask(key)
        assert await answer.refusal() == (401, "invalid_api_key", None)
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.unread == 1
    assert doors.requests() == []


async def test_a_key_has_its_share_and_another_key_has_its_own() -> None:
    doors = Doors(per_key_max=2)
    first = doors.ask(n=2)
    await doors.arrived(2)
    assert await doors.ask(n=3).refusal() == (400, "invalid_request", "n")
    refused = await doors.ask().end()
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert refused.error["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1
    other = doors.ask(OTHER)
    await doors.arrived(3)
    await doors.finish(first, other)
    again = doors.ask()
    await doors.arrived(4)
    again.leave()
    await again.end()
    assert empty(doors)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_too_long_gets_a_503_that_names_who_is_there(stream: bool) -> None:
    doors = Doors(queue_timeout_s=0.5)
    running = doors.ask()
    id = await doors.arrived()
    doors.line.say("w", accepted("w", id), reused("w", id))
    waiting = doors.ask(stream=stream, n=2)
    await doors.arrived(3)
    ids = [request.id for request in doors.requests()[1:]]
    answer = await waiting.end()
    assert (answer.status, answer.error["code"]) == (503, "text_generation_busy")
    assert (answer.error["running_ids"], answer.error["waiting_ids"]) == ([id], ids)
    assert id in answer.error["message"]
    assert "within 0.5 s: 1 requests are running and 2 are waiting" in answer.error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert sorted(doors.cancels()) == sorted(ids)
    doors.line.say("w", events("w", id, "x"), finished("w", id))
    assert (await running.end()).status == 200
    assert empty(doors)


async def test_a_stream_that_has_headers_already_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.answers.answer.HEADERS_HELD_S_MAX", 0.001)
    doors = Doors(queue_timeout_s=1.0)
    answer = doors.ask(stream=True)
    id = await doors.arrived()
    doors.line.say("w", accepted("w", id))
    await answer.holds(b'"role":"assistant"')
    await answer.end()
    assert answer.status == 200
    assert b'"code":"text_generation_busy"' in answer.body
    assert id.encode() in answer.body
    assert doors.cancels() == [id]
    assert empty(doors)


async def test_a_request_that_was_begun_has_all_the_time_it_needs() -> None:
    doors = Doors(queue_timeout_s=0.5)
    answer = doors.ask()
    id = await doors.arrived()
    doors.line.say("w", accepted("w", id), reused("w", id))
    asked = time.monotonic()
    await until(lambda: time.monotonic() - asked > 0.6)
    assert not answer.task.done()
    doors.line.say("w", events("w", id, "y"), finished("w", id))
    assert (await answer.end()).status == 200
    assert doors.cancels() == []
    assert empty(doors)


async def test_full_gateway_refuses_before_reading_the_body() -> None:
    doors = Doors(waiting_max=1)
    first = doors.ask(n=2)
    await doors.arrived(2)
    for body in (b'{"messages": [', b"nonsense"):
        headers = [(b"authorization", b"Bearer " + KEY.encode())]
        refused = await Exchange(doors.app, "POST", CHAT, body, headers).end()
        assert (refused.status, refused.error["code"]) == (503, "text_generation_busy")
        assert len(refused.error["waiting_ids"]) == 2
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.unread == 1
    await doors.finish(first)
    wrong = await Exchange(doors.app, "POST", CHAT, b"nonsense", headers).end()
    assert wrong.status == 400
    assert empty(doors)


async def test_a_house_is_not_full_while_any_model_has_room_or_none_serves_it() -> None:
    doors = Doors(waiting_max=0)
    first = doors.ask()
    await doors.arrived()
    doors.line.serving("v", model="other", rows=1)
    assert (await doors.ask(model="unknown").end()).status == 404
    second = doors.ask(model="other")
    await until(lambda: doors.requests("v"))
    assert (await doors.ask(model="unknown").end()).status == 503
    doors.line.hello("u", model="loading")
    assert (await doors.ask(model="unknown").end()).status == 404
    for exchange in (first, second):
        exchange.leave()
        await exchange.end()
    assert empty(doors)


async def test_bodies_beyond_the_budget_are_refused_until_there_is_room() -> None:
    doors = Doors(body_bytes_max=4096, body_budget_bytes=4096)
    first = doors.ask(filler=3000)
    id = await doors.arrived()
    refused = await doors.ask(OTHER, filler=3000).end()
    assert (refused.status, refused.error["code"]) == (503, "text_generation_busy")
    assert refused.error["waiting_ids"] == [id]
    assert int(refused.headers["retry-after"]) >= 1
    small = doors.ask(OTHER)
    await doors.arrived(2)
    await doors.finish(first, small)
    again = doors.ask(filler=3000)
    await doors.arrived(3)
    again.leave()
    await again.end()
    assert empty(doors)


def test_limits_that_make_no_sense_together_are_refused() -> None:
    with pytest.raises(ValueError, match="no API keys"):
        GatewaySettings(max_per_key=1)
    with pytest.raises(ValueError, match="body_budget_bytes"):
        GatewaySettings(body_bytes_max=2048, body_budget_bytes=2047)
    with pytest.raises(ValueError, match="media_memory"):
        GatewaySettings(media_bytes_max=2048, media_memory=2047)
    GatewaySettings(max_per_key=1, api_keys_file=Path("keys"))


async def test_a_page_that_was_named_may_ask_and_no_other() -> None:
    named, off, another = (
        Doors(cors_origins=origins) for origins in ((PAGE,), (), ("https://another.example",))
    )
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization, x-a"}
    networks = ("private", "local")
    asked |= {f"access_control_request_{network}_network": "true" for network in networks}
    answer = await named.get(CHAT, "OPTIONS", origin=PAGE, **asked).end()
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    assert "x-a" in allowed
    assert all(answer.headers[f"access-control-allow-{network}-network"] == "true" for network in networks)
    assert "access-control-allow-credentials" not in answer.headers
    keyless = await named.get("/v1/models", origin=PAGE).end()
    assert (keyless.status, keyless.headers["access-control-allow-origin"]) == (401, PAGE)
    keyed = await named.get("/v1/models", origin=PAGE, x_api_key=KEY).end()
    assert keyed.status == 200
    assert "x-request-id" in keyed.headers["access-control-expose-headers"]
    for doors in (off, another):
        for origin in (PAGE, "null", PAGE + ".evil.example", PAGE.replace("https", "http")):
            answer = await doors.get(CHAT, "OPTIONS", origin=origin, **asked).end()
            assert answer.status in (400, 401)
            read = await doors.get("/v1/models", origin=origin, x_api_key=KEY).end()
            for told in (answer, read):
                assert not {"access-control-allow-origin", "access-control-allow-private-network"} & set(
                    told.headers
                )
