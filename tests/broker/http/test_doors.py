"""Checks before dispatch, in process: API keys, per-key concurrency, body budget, queue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.gateway_settings import GatewaySettings
from protocol.messages import Cancel
from tests.broker.application import CHAT, House
from tests.broker.asgi import Exchange, until
from tests.factories import accepted, events, finished, reused

KEY, OTHER = "rh-one", "rh-two"
PAGE = "https://page.example"


class Doors(House):
    """Application with API keys, whose workers are played by the test."""

    def __init__(self, *, per_key_max: int | None = None, waiting_max: int = 8, **configured: Any) -> None:
        super().__init__(
            api_keys=(KEY, OTHER), per_key_max=per_key_max, waiting_max=waiting_max, **configured
        )
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


# --- keys --------------------------------------------------------------------------------------------


async def test_without_a_key_nothing_reaches_a_worker_and_the_body_is_not_read() -> None:
    doors = Doors()
    for key in (None, "wrong"):
        answer = await doors.ask(key).end()
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.unread == 1
    assert doors.requests() == []


# --- per-key concurrency -----------------------------------------------------------------------------


async def test_a_key_has_its_share_and_another_key_has_its_own() -> None:
    doors = Doors(per_key_max=2)
    first = doors.ask(n=2)
    await doors.arrived(2)
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


async def test_several_answers_are_within_the_share_all_together_or_not_at_all() -> None:
    doors = Doors(per_key_max=3)
    first = doors.ask(n=2)
    await doors.arrived(2)
    assert (await doors.ask(n=2).end()).status == 429
    assert len(doors.requests()) == 2
    never = await doors.ask(n=4).end()
    assert (never.status, never.error["param"]) == (400, "n")
    await doors.finish(first)
    assert empty(doors)


# --- the queue ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_too_long_gets_a_503_that_names_who_is_there(stream: bool) -> None:
    doors = Doors(queue_timeout_s=0.05)
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
    assert "within 0.05 s: 1 requests are running and 2 are waiting" in answer.error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert sorted(doors.cancels()) == sorted(ids)
    doors.line.say("w", events("w", id, "x"), finished("w", id))
    assert (await running.end()).status == 200
    assert empty(doors)


async def test_a_stream_that_has_headers_already_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.http.respond.HEADERS_HELD_S_MAX", 0.01)
    doors = Doors(queue_timeout_s=0.3)
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


@pytest.mark.parametrize("word", ["reused", "delta"])
async def test_a_request_that_was_begun_has_all_the_time_it_needs(word: str) -> None:
    doors = Doors(queue_timeout_s=0.05)
    answer = doors.ask()
    id = await doors.arrived()
    first = reused("w", id) if word == "reused" else events("w", id, "x")
    doors.line.say("w", accepted("w", id), first)
    asked = time.monotonic()
    await until(lambda: time.monotonic() - asked > 0.2)
    assert not answer.task.done()
    doors.line.say("w", events("w", id, "y", first=int(word == "delta")), finished("w", id))
    assert (await answer.end()).status == 200
    assert doors.cancels() == []
    assert empty(doors)


async def test_an_answer_is_measured_when_it_is_finished_and_not_when_its_client_has_read_it() -> None:
    doors = Doors()
    answer = doors.ask(n=2)
    await doors.arrived(2)
    first, second = doors.requests()
    doors.line.clock.now += 8.0
    doors.line.beat("w")
    doors.line.say("w", accepted("w", first.id), events("w", first.id, "x"), finished("w", first.id))
    assert doors.line.dispatcher.admission.retry_after_s(1) == 8.0
    answer.leave()
    await answer.end()
    assert [m for _, m in doors.line.sent if isinstance(m, Cancel)] == [
        Cancel(incarnation="gateway", id=second.id)
    ]
    assert doors.line.dispatcher.admission.retry_after_s(1) == 8.0


# --- full queue --------------------------------------------------------------------------------------


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


async def test_prompts_that_wait_leave_no_room_for_a_long_one() -> None:
    doors = Doors()
    first = doors.ask(filler=28_000)
    id = await doors.arrived()
    second = doors.ask(filler=24_000)
    other = await doors.arrived(2)
    refused = await doors.ask(filler=24_000).end()
    assert (refused.status, refused.error["code"]) == (503, "text_generation_busy")
    assert refused.error["message"].startswith("Waiting prompts have 13")
    assert refused.error["waiting_ids"] == [id, other]
    doors.line.say("w", accepted("w", id))
    third = doors.ask(filler=24_000)
    await doors.arrived(3)
    await doors.finish(first, second, third)
    assert empty(doors)


# --- bodies ------------------------------------------------------------------------------------------


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
    last = doors.ask(filler=3000)
    await doors.arrived(4)
    last.leave()
    await last.end()
    assert empty(doors)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_per_key": 1}, "no API keys"),
        ({"body_bytes_max": 2048, "body_budget_bytes": 2047}, "body_budget_bytes"),
        ({"media_bytes_max": 2048, "media_memory": 2047}, "media_memory"),
    ],
)
def test_limits_that_make_no_sense_together_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        GatewaySettings(**fields)
    GatewaySettings(max_per_key=1, api_keys_file=Path("keys"))


# --- other origins -----------------------------------------------------------------------------------


def preflight(doors: Doors, origin: str = PAGE, method: str = "POST") -> Exchange:
    return doors.get(
        CHAT,
        "OPTIONS",
        origin=origin,
        access_control_request_method=method,
        access_control_request_headers="authorization, content-type, x-stainless-os",
    )


async def test_a_page_may_ask_whether_it_may_ask_without_a_key() -> None:
    doors = Doors(cors_origins=(PAGE,))
    answer = await preflight(doors).end()
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    assert "x-stainless-os" in allowed
    assert "access-control-allow-credentials" not in answer.headers
    asked = await doors.get("/v1/models", origin=PAGE).end()
    assert asked.status == 401
    assert asked.headers["access-control-allow-origin"] == PAGE
    asked = await doors.get("/v1/models", origin=PAGE, x_api_key=KEY).end()
    assert asked.status == 200
    assert "x-request-id" in asked.headers["access-control-expose-headers"]


NO_PAGES: list[Callable[[], Doors]] = [Doors, lambda: Doors(cors_origins=("https://another.example",))]


@pytest.mark.parametrize("made", NO_PAGES, ids=["off", "another"])
async def test_a_page_that_was_not_named_is_allowed_nothing(made: Callable[[], Doors]) -> None:
    doors = made()
    for origin in (PAGE, "null", PAGE + ".evil.example", PAGE.replace("https", "http")):
        answer = await preflight(doors, origin).end()
        assert answer.status in (400, 401)
        assert "access-control-allow-origin" not in answer.headers
        asked = await doors.get("/v1/models", origin=origin, x_api_key=KEY).end()
        assert "access-control-allow-origin" not in asked.headers
