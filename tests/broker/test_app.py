"""The gateway's HTTP side, in process: routes, ids, errors, and clients that come and go."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from starlette.types import ASGIApp

from broker import app as app_module
from broker import status
from broker.app import Gateway, create_app
from broker.config import GatewaySettings
from broker.dispatch import flights as inflight
from broker.dispatch.fleet import Verdict
from broker.http import respond
from broker.line.link import Link
from protocol.messages import Cancel, ClearCache, Generate, Loading, Message, PrefixStatus, RowStatus
from tests.broker.asgi import Exchange, lifespan, run, until
from tests.broker.dispatching import (
    SILENT_S,
    Line,
    accepted,
    cleared,
    events,
    failed,
    finished,
    ready,
    reused,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(32)


class MemoryLink:
    """What the application asks of a link."""

    def __init__(self) -> None:
        self.heard: list[Callable[..., None]] = []
        self.closed = False
        self.errors: Counter[str] = Counter()

    def start(self, hear: Callable[..., None], lost: Callable[..., None]) -> None:
        self.heard = [hear, lost]

    def close(self) -> None:
        self.closed = True

    def send(self, peer: str, message: Message, media: Sequence[bytes] = ()) -> bool:
        raise AssertionError("the dispatcher sends")


class House:
    """An application whose workers are played by the test."""

    def __init__(self, **configured: Any) -> None:
        self.line = Line(waiting_max=1)
        self.line.clock.now = time.monotonic()
        self.link = MemoryLink()
        settings = GatewaySettings(**{"keepalive_s": 60.0, **configured})
        self.gateway = Gateway(settings=settings, dispatcher=self.line.dispatcher, link=cast(Link, self.link))
        self.app: ASGIApp = create_app(self.gateway)

    def get(self, path: str, method: str = "GET", **headers: str) -> Exchange:
        given = [
            (name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()
        ]
        return Exchange(self.app, method, path, headers=given)

    def chat(self, content: object = "hello", **fields: object) -> Exchange:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return Exchange(self.app, "POST", CHAT, json.dumps(body).encode())

    def text(self, prompt: object = "Once", **fields: object) -> Exchange:
        return Exchange(self.app, "POST", TEXT, json.dumps({"prompt": prompt, **fields}).encode())

    def requests(self, worker: str = "w") -> list[Generate]:
        return [m for to, m in self.line.sent if to == worker and isinstance(m, Generate)]

    def cancels(self, worker: str = "w") -> list[str]:
        return [m.id for to, m in self.line.sent if to == worker and isinstance(m, Cancel)]

    async def arrived(self, number: int = 1) -> str:
        """The id of the last request, once so many have reached the worker."""
        await until(lambda: len(self.requests()) >= number)
        return self.requests()[-1].id


@pytest.fixture
def house() -> House:
    """One worker serves."""
    house = House()
    house.line.serving("w", "org/model", rows=1)
    return house


# --- routes ------------------------------------------------------------------------------------------


def test_the_gateway_is_healthy_without_any_worker() -> None:
    async def talk() -> None:
        answer = await House().get("/health").end()
        assert (answer.status, answer.json) == (200, {"status": "ok"})

    run(talk())


def test_the_gateway_is_ready_as_long_as_a_worker_serves() -> None:
    house = House()

    async def talk() -> None:
        absent = await house.get("/ready").end()
        assert (absent.status, absent.error["code"]) == (503, "worker_unavailable")
        assert int(absent.headers["retry-after"]) >= 1
        house.line.hello("w")
        house.line.dispatcher.hear("w", Loading(incarnation="w", done=1, total=4))
        loading = await house.get("/ready").end()
        assert (loading.status, loading.error["code"]) == (503, "model_loading")
        assert "25%" in loading.error["message"]
        assert int(loading.headers["retry-after"]) >= 1
        house.line.dispatcher.hear("w", ready("w"))
        serving = await house.get("/ready").end()
        assert (serving.status, serving.json) == (200, {"status": "ready"})
        house.line.dispatcher.lost("w")
        assert (await house.get("/ready").end()).status == 503

    run(talk())


def test_models_are_those_that_workers_have_named() -> None:
    house = House()

    async def talk() -> None:
        assert (await house.get("/v1/models").end()).json == {"object": "list", "data": []}
        house.line.serving("w2", "org/small")
        house.line.hello("w1", "a-model")
        listed = (await house.get("/v1/models").end()).json["data"]
        assert [model["id"] for model in listed] == ["a-model", "org/small"]
        assert [model.get("context_length") for model in listed] == [None, 8192]
        for model in listed:
            assert (model["object"], model["owned_by"]) == ("model", "roundhouse")
            assert abs(model["created"] - time.time()) < 60
            assert (await house.get(f"/v1/models/{model['id']}").end()).json == model
        house.line.dispatcher.lost("w2")
        assert (await house.get("/v1/models/org/small").end()).status == 200

    run(talk())


def test_a_model_that_is_not_there_is_not_found(house: House) -> None:
    async def talk() -> None:
        answer = await house.get("/v1/models/org/other").end()
        assert answer.status == 404
        assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")

    run(talk())


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/nothing", "/v1/%00", "/v1/status/"])
def test_an_address_without_anything_is_an_error_object(path: str, house: House) -> None:
    async def talk() -> None:
        answer = await house.get(path).end()
        assert (answer.status, answer.error["code"]) == (404, "route_not_found")
        assert answer.error["type"] == "invalid_request_error"
        assert path in answer.error["message"]

    run(talk())


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("DELETE", "/v1/models"), ("POST", "/health")])
def test_a_method_that_is_not_taken_is_an_error_object(method: str, path: str, house: House) -> None:
    async def talk() -> None:
        answer = await house.get(path, method).end()
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert method in answer.error["message"]
        assert method not in answer.headers["allow"]

    run(talk())


# --- request ids -------------------------------------------------------------------------------------


def test_a_request_id_of_the_client_is_echoed(house: House) -> None:
    async def talk() -> None:
        for given in ("a", "trace-1/2:3", "x" * 128, '{"a":1}'):
            answer = await house.get("/health", x_request_id=given).end()
            assert answer.headers["x-request-id"] == given

    run(talk())


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\tb", "é", "\x7f", "a\r\nset-cookie: b"])
def test_a_missing_or_insane_request_id_is_replaced(given: str | None, house: House) -> None:
    async def talk() -> None:
        headers = {} if given is None else {"x_request_id": given}
        ids = [(await house.get("/health", **headers).end()).headers["x-request-id"] for _ in range(2)]
        assert all(re.fullmatch(r"req_[0-9a-f]{24}", id) for id in ids)
        assert ids[0] != ids[1]

    run(talk())


def test_every_kind_of_answer_carries_a_request_id(house: House) -> None:
    async def talk() -> None:
        for answer in (house.get("/nothing"), house.chat(temperature=9), house.get(CHAT)):
            assert (await answer.end()).headers["x-request-id"].startswith("req_")
        stream = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id))
        await stream.started()
        assert stream.headers["x-request-id"].startswith("req_")
        stream.leave()
        await stream.end()

    run(talk())


# --- chat --------------------------------------------------------------------------------------------


def test_a_whole_answer_has_its_length_and_its_text(house: House) -> None:
    async def talk() -> None:
        answer = house.chat(model="org/model", temperature=0)
        id = await house.arrived()
        assert house.requests()[0].messages == [{"role": "user", "content": "hello"}]
        house.line.say("w", accepted("w", id), events("w", id, "all ", "aboard 🚂"), finished("w", id, 2))
        document = (await answer.end()).json
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert document["id"] == id
        assert document["model"] == "org/model"
        assert document["choices"][0]["message"]["content"] == "all aboard 🚂"
        assert abs(document["created"] - time.time()) < 60

    run(talk())
    assert house.cancels() == []
    assert len(house.line.dispatcher.flights) == 0


def test_a_stream_is_sent_as_it_comes(house: House) -> None:
    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id))
        await answer.holds(b'"role":"assistant"')
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert "content-length" not in answer.headers
        house.line.say("w", events("w", id, "all "))
        await answer.holds(b'"all "')
        house.line.say("w", events("w", id, "aboard", first=1))
        await answer.holds(b'"aboard"')
        assert not answer.task.done()
        house.line.say("w", finished("w", id, 2))
        await answer.end()
        assert answer.complete
        assert answer.body.endswith(b"data: [DONE]\n\n")

    run(talk())
    assert len(house.line.dispatcher.flights) == 0


def test_nothing_is_sent_before_the_workers_first_word() -> None:
    house = House(keepalive_s=0.01)
    house.line.serving("w")

    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        asked = time.monotonic()
        await until(lambda: time.monotonic() - asked > 0.05)
        assert answer.sent == []
        house.line.say("w", failed("w", id, "context_length_exceeded"))
        await answer.end()
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")

    run(talk())


def test_a_silent_stream_is_kept_alive_with_comments() -> None:
    house = House(keepalive_s=0.02)
    house.line.serving("w")

    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id))
        await answer.holds(b": keep-alive\n\n: keep-alive\n\n")
        house.line.say("w", events("w", id, "x"), finished("w", id))
        await answer.end()
        assert answer.body.endswith(b"data: [DONE]\n\n")

    run(talk())


def test_a_whole_answer_is_never_padded_with_comments() -> None:
    house = House(keepalive_s=0.01)
    house.line.serving("w")

    async def talk() -> None:
        answer = house.chat()
        id = await house.arrived()
        house.line.say("w", accepted("w", id), events("w", id, "x"))
        started = time.monotonic()
        await until(lambda: time.monotonic() - started > 0.05)
        assert answer.sent == []
        house.line.say("w", finished("w", id))
        assert (await answer.end()).json["choices"][0]["message"]["content"] == "x"

    run(talk())


def test_an_image_travels_behind_the_request() -> None:
    house = House()
    house.line.serving("w", images=True)
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()

    async def talk() -> None:
        answer = house.chat([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}])
        id = await house.arrived()
        [media] = house.requests()[0].media
        assert (media.frame, media.mime) == (0, "image/png")
        assert house.line.media[id] == [PNG]
        house.line.say("w", finished("w", id))
        await answer.end()
        assert answer.status == 200

    run(talk())


@pytest.mark.parametrize(
    ("images", "url", "code"),
    [
        (False, "data:image/png;base64," + base64.b64encode(PNG).decode(), "unsupported_media"),
        (True, "data:image/png;base64,AAAA", "invalid_media"),
        (True, "https://example.org/cat.png", "invalid_media"),
    ],
)
def test_an_image_that_cannot_be_served_is_named(images: bool, url: str, code: str) -> None:
    house = House()
    house.line.serving("w", images=images)

    async def talk() -> None:
        content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]
        answer = await house.chat(content).end()
        assert answer.status == 400
        assert (answer.error["code"], answer.error["param"]) == (code, "messages[0].content[1]")

    run(talk())
    assert house.requests() == []


# --- what was reused ---------------------------------------------------------------------------------

CACHE = "x-roundhouse-cache"


def test_a_whole_answer_says_what_was_reused_in_its_headers_and_its_usage(house: House) -> None:
    async def talk() -> None:
        answer = house.chat()
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id, 2, "disk", "diverged"), events("w", id, "x"))
        house.line.say("w", finished("w", id, cached=2))
        await answer.end()
        assert answer.headers[CACHE] == "hit=2/3; tier=disk; miss=diverged"
        assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}

    run(talk())


def test_a_whole_answer_of_a_worker_that_does_not_say_has_the_header_too(house: House) -> None:
    async def talk() -> None:
        answer = house.text()
        id = await house.arrived()
        house.line.say("w", events("w", id, "x"), finished("w", id))
        assert (await answer.end()).headers[CACHE] == "hit=0/3; tier=none; miss=unreported"

    run(talk())


def test_a_stream_begins_when_it_is_known_what_was_reused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "HEADERS_HELD_S_MAX", 600.0)

    async def talk() -> None:
        answer = house.chat(stream=True, stream_options={"include_usage": True})
        id = await house.arrived()
        house.line.say("w", accepted("w", id))
        for _ in range(10):
            await asyncio.sleep(0)
        assert answer.sent == []
        house.line.say("w", reused("w", id, 3, "ram", ""))
        await answer.holds(b'"role":"assistant"')
        assert answer.headers[CACHE] == "hit=3/3; tier=ram; miss=none"
        house.line.say("w", events("w", id, "x"), finished("w", id, cached=3))
        await answer.end()
        assert b'"cached_tokens":3' in answer.body

    run(talk())


@pytest.mark.parametrize("first", ["delta", "end"])
def test_a_stream_of_a_worker_that_does_not_say_begins_with_its_text(
    first: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "HEADERS_HELD_S_MAX", 600.0)

    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id))
        if first == "delta":
            house.line.say("w", events("w", id, "x"))
            await answer.holds(b'"x"')
            assert CACHE not in answer.headers
        house.line.say("w", finished("w", id))
        await answer.end()
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert (CACHE in answer.headers) == (first == "end")

    run(talk())


def test_a_stream_that_waits_in_the_queue_begins_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "HEADERS_HELD_S_MAX", 0.01)

    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id))
        await answer.holds(b'"role":"assistant"')
        assert (answer.status, CACHE in answer.headers) == (200, False)
        house.line.say("w", reused("w", id), events("w", id, "x"), finished("w", id))
        await answer.end()
        assert answer.body.count(b'"role"') == answer.body.count(b'"x"') == 1
        assert answer.body.endswith(b"data: [DONE]\n\n")

    run(talk())


@pytest.mark.parametrize("leaves", [False, True])
def test_what_goes_wrong_while_the_headers_are_held_is_as_before_the_first_word(
    leaves: bool, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "HEADERS_HELD_S_MAX", 600.0)

    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id))
        for _ in range(10):
            await asyncio.sleep(0)
        if leaves:
            answer.leave()
            await answer.end()
            assert answer.sent == []
            assert house.cancels() == [id]
        else:
            house.line.lose_for_good("w")
            await answer.end()
            assert (answer.status, answer.error["code"]) == (503, "worker_unavailable")
            assert CACHE not in answer.headers

    run(talk())
    assert len(house.line.dispatcher.flights) == 0


def test_a_stream_of_several_prompts_waits_for_what_is_known_of_each(
    roomy: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "HEADERS_HELD_S_MAX", 600.0)

    async def talk() -> None:
        answer = roomy.text(["a", "b"], n=2, stream=True)
        await roomy.arrived(4)
        ids = [request.id for request in roomy.requests()]
        for id in ids:
            roomy.line.say("w", accepted("w", id))
        roomy.line.say("w", reused("w", ids[0], 1), reused("w", ids[1], 3))
        for _ in range(10):
            await asyncio.sleep(0)
        assert answer.sent == []
        roomy.line.say("w", reused("w", ids[3], 2, "ram"))
        await answer.started()
        assert answer.headers[CACHE] == "hit=3/6; tier=ram; miss=cold"
        answer.leave()
        await answer.end()

    run(talk())


# --- what operators see and do -----------------------------------------------------------------------


def cleared_by(house: House, worker: str) -> str:
    """The id of the order to clear its cache that a worker got."""
    [id] = [m.id for to, m in house.line.sent if to == worker and isinstance(m, ClearCache)]
    return id


def test_the_status_names_workers_and_their_requests(house: House) -> None:
    async def talk() -> None:
        row = RowStatus(id="chatcmpl-1", phase="prefill", prompt_tokens=100, prefilled=64, seconds=0.5)
        house.line.beat("w", running=1, steps=3, rows=[row])
        answer = (await house.get("/v1/status").end()).json
        assert answer["gateway"]["uptime_s"] >= 0
        [worker] = answer["workers"]
        assert (worker["model"], worker["state"], worker["steps"]) == ("org/model", "ready", 3)
        assert [(row["id"], row["prefilled"]) for row in worker["rows"]] == [("chatcmpl-1", 64)]

    run(talk())


def test_the_cache_is_shown_by_model(house: House) -> None:
    async def talk() -> None:
        house.line.beat("w", prefix=PrefixStatus(ram_bytes=5, lookups=2, hits=1))
        [cache] = (await house.get("/v1/cache").end()).json["data"]
        assert (cache["model"], cache["ram_bytes"], cache["hit_rate"]) == ("org/model", 5, 0.5)
        refused = await house.get("/v1/cache", "POST").end()
        assert (refused.status, refused.error["code"]) == (405, "method_not_allowed")
        assert {"GET", "DELETE"} <= set(refused.headers["allow"].split(", "))

    run(talk())


def test_a_cache_is_cleared_when_every_worker_has_said_so(house: House) -> None:
    house.line.serving("w2", "org/model")
    house.line.serving("w3", "another")

    async def talk() -> None:
        answer = house.get("/v1/cache", "DELETE")
        await until(lambda: any(isinstance(message, ClearCache) for _, message in house.line.sent))
        for number, worker in enumerate(["w3", "w", "w2"]):
            assert not answer.task.done()
            house.line.say(worker, cleared(worker, cleared_by(house, worker), 10 + number, 1))
        assert (await answer.end()).json == {
            "object": "list",
            "data": [
                {"model": "another", "ram_bytes": 10, "disk_bytes": 1},
                {"model": "org/model", "ram_bytes": 23, "disk_bytes": 2},
            ],
        }

    run(talk())


def test_the_cache_of_one_model_is_cleared_alone(house: House) -> None:
    house.line.serving("w2", "another")

    async def talk() -> None:
        answer = house.get("/v1/cache?model=org/model", "DELETE")
        await until(lambda: any(isinstance(message, ClearCache) for _, message in house.line.sent))
        house.line.say("w", cleared("w", cleared_by(house, "w"), 7))
        assert [freed["model"] for freed in (await answer.end()).json["data"]] == ["org/model"]
        assert not any(isinstance(message, ClearCache) for message in house.line.sent_to("w2"))
        unknown = await house.get("/v1/cache?model=none", "DELETE").end()
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")

    run(talk())


@pytest.mark.parametrize(
    ("how", "status_code", "code"),
    [
        ("silence", 504, "deadline_exceeded"),
        ("death", 503, "worker_unavailable"),
        ("absence", 503, "worker_unavailable"),
    ],
)
def test_a_cache_that_cannot_be_cleared_is_an_error_object(
    how: str, status_code: int, code: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "silence":
        monkeypatch.setattr(status, "CLEAR_WAIT_S_MAX", 0.01)
    if how == "absence":
        house.line.dispatcher.lost("w")

    async def talk() -> None:
        answer = house.get("/v1/cache", "DELETE")
        if how == "death":
            await until(lambda: any(isinstance(message, ClearCache) for _, message in house.line.sent))
            house.line.dispatcher.lost("w")
        await answer.end()
        assert (answer.status, answer.error["code"]) == (status_code, code)

    run(talk())


# --- several answers to one request ------------------------------------------------------------------


@pytest.fixture
def roomy() -> House:
    """One worker serves, with room for five."""
    house = House()
    house.line.serving("w", "org/model", rows=4)
    return house


def test_n_answers_are_n_requests_alike_but_for_their_seeds(roomy: House) -> None:
    async def talk() -> None:
        answer = roomy.chat(n=3, seed=7, temperature=0)
        await roomy.arrived(3)
        first, *others = roomy.requests()
        assert first.sampling.seed == 7
        assert all(other.messages == first.messages for other in others)
        assert len({request.sampling.seed for request in roomy.requests()}) == 3
        for number, request in reversed([*enumerate(roomy.requests())]):
            id = request.id
            roomy.line.say("w", accepted("w", id), events("w", id, f"{number}", "!"), finished("w", id, 2))
        document = (await answer.end()).json
        assert [c["message"]["content"] for c in document["choices"]] == ["0!", "1!", "2!"]
        assert [c["index"] for c in document["choices"]] == [0, 1, 2]
        assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (3, 6)
        assert document["id"] == first.id

    run(talk())
    assert roomy.cancels() == []
    assert len(roomy.line.dispatcher.flights) == 0


def test_without_room_for_all_answers_none_is_begun(roomy: House) -> None:
    async def talk() -> None:
        aboard = [roomy.chat(stream=True) for _ in range(3)]
        await roomy.arrived(3)
        answer = await roomy.chat(n=3).end()
        assert (answer.status, answer.error["code"]) == (503, "text_generation_busy")
        assert len(roomy.requests()) == 3
        never = await roomy.chat(n=6).end()
        assert (never.status, never.error["param"]) == (400, "n")
        for exchange in aboard:
            exchange.leave()
            await exchange.end()

    run(talk())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_the_worker_refuses_is_one_400_and_the_copies_are_cancelled(
    stream: bool, roomy: House
) -> None:
    async def talk() -> None:
        answer = roomy.chat(n=3, stream=stream)
        await roomy.arrived(3)
        a, b, c = [request.id for request in roomy.requests()]
        roomy.line.say("w", accepted("w", a), failed("w", b, "context_length_exceeded"))
        await answer.end()
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert roomy.cancels() == [a, c]

    run(talk())


def test_one_answer_that_fails_on_the_way_ends_the_stream_and_cancels_the_others(roomy: House) -> None:
    async def talk() -> None:
        answer = roomy.chat(n=3, stream=True)
        await roomy.arrived(3)
        a, b, c = [request.id for request in roomy.requests()]
        roomy.line.say("w", *(accepted("w", id) for id in (a, b, c)), events("w", a, "x"), finished("w", a))
        await answer.holds(b'"x"')
        roomy.line.say("w", events("w", b, "y"), failed("w", b))
        await answer.end()
        assert answer.body.count(b'"error"') == answer.body.count(b"[DONE]") == 1
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert roomy.cancels() == [c]

    run(talk())
    assert len(roomy.line.dispatcher.flights) == 0


def test_a_client_that_leaves_frees_the_rows_of_all_its_answers(roomy: House) -> None:
    async def talk() -> None:
        answer = roomy.chat(n=3, stream=True)
        await roomy.arrived(3)
        ids = [request.id for request in roomy.requests()]
        roomy.line.say("w", *(accepted("w", id) for id in ids), events("w", ids[2], "x"))
        await answer.holds(b'"x"')
        answer.leave()
        await answer.end()
        assert roomy.cancels() == ids

    run(talk())
    assert len(roomy.line.dispatcher.flights) == 0


def test_a_worker_lost_for_good_under_several_answers_is_one_error(roomy: House) -> None:
    async def talk() -> None:
        answer = roomy.chat(n=2, stream=True)
        await roomy.arrived(2)
        for request in roomy.requests():
            roomy.line.say("w", accepted("w", request.id), events("w", request.id, "x"))
        await answer.holds(b'"index":1,"delta":{"content":"x"}')
        roomy.line.lose_for_good("w")
        await answer.end()
        assert answer.body.count(b'"worker_unavailable"') == answer.body.count(b"[DONE]") == 1

    run(talk())


# --- the older completions ---------------------------------------------------------------------------


def test_a_completion_goes_on_with_its_prompts(roomy: House) -> None:
    async def talk() -> None:
        answer = roomy.text(["Once", "Twice"], n=2)
        await roomy.arrived(4)
        assert [request.prompt for request in roomy.requests()] == ["Once", "Once", "Twice", "Twice"]
        for number, request in enumerate(roomy.requests()):
            roomy.line.say("w", events("w", request.id, f"{number}", ""), finished("w", request.id, 2))
        document = (await answer.end()).json
        assert document["object"] == "text_completion"
        assert [choice["text"] for choice in document["choices"]] == ["0", "1", "2", "3"]
        assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (6, 8)

    run(talk())


def test_a_streamed_completion_begins_when_it_is_accepted(house: House) -> None:
    async def talk() -> None:
        answer = house.text(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id))
        await answer.started()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        house.line.say("w", events("w", id, " upon"), finished("w", id))
        await answer.end()
        assert b'"text":" upon"' in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")

    run(talk())


def test_a_bad_completion_reaches_no_worker(house: House) -> None:
    async def talk() -> None:
        answer = await house.text(echo=True).end()
        assert (answer.status, answer.error["code"]) == (400, "unsupported_parameter")

    run(talk())
    assert house.requests() == []


# --- refusals ----------------------------------------------------------------------------------------


def test_a_bad_body_reaches_no_worker(house: House) -> None:
    async def talk() -> None:
        answer = await house.chat(temperature=9).end()
        assert answer.status == 400
        assert (answer.error["code"], answer.error["param"]) == ("invalid_request", "temperature")

    run(talk())
    assert house.requests() == []


def test_a_model_nobody_serves_is_not_found(house: House) -> None:
    async def talk() -> None:
        answer = await house.chat(model="other").end()
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "org/model" in answer.error["message"]

    run(talk())


def test_beyond_capacity_the_answer_is_no_at_once(house: House) -> None:
    async def talk() -> None:
        aboard = [house.chat(stream=True) for _ in range(2)]
        await house.arrived(2)
        answer = await house.chat().end()
        assert (answer.status, answer.error["code"]) == (503, "text_generation_busy")
        assert (answer.error["running"], answer.error["waiting"]) == (0, 2)
        assert answer.error["waiting_ids"] == [request.id for request in house.requests()]
        assert int(answer.headers["retry-after"]) >= 1
        assert "x-should-retry" not in answer.headers
        for exchange in aboard:
            exchange.leave()
            await exchange.end()
        following = house.chat()
        await house.arrived(3)
        following.leave()
        await following.end()

    run(talk())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("engine_error", 500, False),
        ("worker_crashed", 500, False),
        ("shutting_down", 503, True),
        ("a_later_code", 500, False),
    ],
)
def test_what_fails_before_it_began_has_its_status(
    stream: bool, code: str, status: int, retry: bool, house: House
) -> None:
    async def talk() -> None:
        answer = house.chat(stream=stream)
        house.line.say("w", failed("w", await house.arrived(), code))
        await answer.end()
        assert answer.status == status
        assert answer.headers.get("x-should-retry") == (None if retry else "false")
        assert ("retry-after" in answer.headers) == retry
        assert answer.error["type"] == "server_error"

    run(talk())
    assert len(house.line.dispatcher.flights) == 0


def test_a_stream_that_fails_late_ends_with_an_error_and_done(house: House) -> None:
    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), events("w", id, "x"))
        await answer.holds(b'"x"')
        house.line.lose_for_good("w")
        await answer.end()
        assert answer.status == 200
        assert answer.complete
        *_, error, done, rest = answer.body.decode().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "worker_unavailable"
        assert (done, rest) == ("data: [DONE]", "")

    run(talk())


def test_a_gateway_that_stops_says_so_to_newcomers_and_to_those_aboard(house: House) -> None:
    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id))
        await answer.started()
        house.line.dispatcher.stop()
        late = await house.chat().end()
        assert (late.status, late.error["code"]) == (503, "shutting_down")
        house.line.dispatcher.abandon()
        await answer.end()
        assert b"shutting_down" in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert house.cancels() == [id]

    run(talk())


# --- bodies ------------------------------------------------------------------------------------------


def test_a_body_in_pieces_is_read_whole(house: House) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()

    async def talk() -> None:
        pieces = [body[n : n + 7] for n in range(0, len(body), 7)]
        answer = Exchange(house.app, "POST", CHAT, pieces)
        house.line.say("w", finished("w", await house.arrived()))
        assert (await answer.end()).status == 200

    run(talk())


def test_a_body_declared_too_large_is_refused_unread() -> None:
    house = House(body_bytes_max=1024)

    async def talk() -> None:
        # The body never comes: who waits for it waits for ever.
        answer = Exchange(house.app, "POST", CHAT, None, [(b"content-length", b"1025")])
        await answer.end()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert answer.headers["connection"] == "close"

    run(talk())


def test_a_body_that_grows_too_large_is_refused_on_the_way() -> None:
    house = House(body_bytes_max=1024)

    async def talk() -> None:
        answer = Exchange(house.app, "POST", CHAT, [b"[" * 512, b"[" * 512, b"[", *[b"["] * 100])
        await answer.end()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert answer.unread == 100

    run(talk())


def test_a_body_of_the_largest_size_is_read() -> None:
    house = House(body_bytes_max=1024)
    house.line.serving("w")
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    body += b" " * (1024 - len(body))

    async def talk() -> None:
        answer = Exchange(house.app, "POST", CHAT, body, [(b"content-length", b"1024")])
        house.line.say("w", finished("w", await house.arrived()))
        assert (await answer.end()).status == 200

    run(talk())


def test_a_client_that_leaves_while_it_sends_is_nobodys_error(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk() -> None:
        answer = Exchange(house.app, "POST", CHAT, None)
        answer.leave()
        await answer.end()

    with caplog.at_level(logging.WARNING):
        run(talk())
    assert caplog.records == []
    assert house.requests() == []


# --- clients that come and go ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_frees_its_row(stream: bool, begun: bool, house: House) -> None:
    async def talk() -> None:
        answer = house.chat(stream=stream)
        id = await house.arrived()
        if begun:
            house.line.say("w", accepted("w", id), events("w", id, "x"))
            if stream:
                await answer.holds(b'"x"')
        answer.leave()
        await answer.end()
        assert house.cancels() == [id]
        assert not answer.body.endswith(b"[DONE]\n\n")

    run(talk())
    assert len(house.line.dispatcher.flights) == 0


def test_an_exchange_that_is_cancelled_frees_its_row(house: House) -> None:
    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        answer.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer.end()
        assert house.cancels() == [id]

    run(talk())
    assert len(house.line.dispatcher.flights) == 0


def test_a_client_that_does_not_read_loses_its_stream_and_costs_no_more(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "PENDING_DELTAS_MAX", 50)

    async def talk() -> None:
        answer = house.chat(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id))
        await answer.started()
        answer.stop_reading()
        for number in range(200):
            house.line.say("w", events("w", id, "x", first=number))
            await asyncio.sleep(0)
        assert house.cancels() == [id]
        answer.read_on()
        await answer.end()
        assert b'"code":"client_too_slow"' in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.body.count(b'"content":"x"') < 60

    run(talk())


def test_neighbours_do_not_hear_each_other() -> None:
    house = House()
    house.line.serving("w", rows=16)

    async def talk() -> None:
        answers = [house.chat(stream=True) for _ in range(8)]
        await house.arrived(8)
        ids = [request.id for request in house.requests()]
        assert len(set(ids)) == 8
        for step in range(5):
            for id in ids:
                house.line.say("w", events("w", id, f"{id}/{step} ", first=step))
        for id in ids:
            house.line.say("w", finished("w", id))
        for answer in answers:
            body = (await answer.end()).body.decode()
            [id] = [id for id in ids if id in body]
            assert re.findall(r'"content":"([^"]*) "', body) == [f"{id}/{step}" for step in range(5)]

    run(talk())


# --- what goes wrong inside --------------------------------------------------------------------------


def test_an_unhandled_exception_is_an_error_object_and_says_nothing_of_itself(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(app_module.chat_body, "read", break_down)

    async def talk() -> None:
        answer = house.chat()
        with pytest.raises(ZeroDivisionError):
            await answer.end()
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers["x-request-id"].startswith("req_")
        assert b"secret" not in answer.body
        assert (await house.get("/health").end()).status == 200

    run(talk())
    [record] = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


# --- lifespan ----------------------------------------------------------------------------------------


def test_the_line_is_open_for_as_long_as_the_application_runs(house: House) -> None:
    async def talk() -> None:
        async with lifespan(house.app):
            assert house.link.heard == [house.line.dispatcher.hear, house.line.dispatcher.lost]
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
