"""Requests in each dialect, to a worker and back: documents, streams, keepalives and early failures."""

from __future__ import annotations

import base64
import time

import pytest

from broker.api.messages.answer import PING
from protocol.conversation import unpack
from protocol.errors import Code, RequestError
from protocol.messages import failed as refused
from tests.broker.application import BODIES, CHAT, MESSAGES, RESPONSES, SAID, TEXT, House, house_with_worker
from tests.broker.asgi import until
from tests.factories import accepted, events, failed, finished, reused
from tests.images import data_url, picture

BEGIN = {
    CHAT: b'"role":"assistant"', TEXT: b": keep-alive", MESSAGES: b"message_start", RESPONSES: b".created",
}  # fmt: skip
END = {CHAT: b"data: [DONE]\n\n", TEXT: b"data: [DONE]\n\n", MESSAGES: b'{"type":"message_stop"}\n\n'}
KEEPALIVE = {MESSAGES: PING, RESPONSES: b"event: response.in_progress"}
PNG = picture()


@pytest.mark.parametrize("path", BODIES)
async def test_a_document_has_its_length_its_text_and_the_id_that_its_worker_knows(
    path: str, house: House
) -> None:
    answer = await house.serve(house.post(path, model="org/model", **BODIES[path]), "all ", "aboard 🚂")
    [request] = house.requests()
    assert unpack(request).messages == (None if path == TEXT else SAID)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert (answer.json["id"], answer.json["model"]) == (request.id, "org/model")
    assert "all aboard 🚂" in answer.body.decode()
    assert abs(answer.json.get("created", time.time()) - time.time()) < 60
    assert answer.headers["x-roundhouse-cache"] == "hit=0/3; tier=none; miss=cold"
    assert house.cancels() == []
    assert len(house.line.dispatcher.flights) == 0
    assert house.gateway.answering == {}


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_is_sent_as_it_comes_and_kept_alive(path: str) -> None:
    house = house_with_worker(keepalive_s=0.02)
    answer = house.post(path, stream=True, **BODIES[path])
    id = await house.arrived()
    house.line.say("w", accepted("w", id), reused("w", id))
    await answer.holds(BEGIN[path])
    assert (answer.status, answer.headers["cache-control"]) == (200, "no-cache")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in answer.headers
    keepalive = KEEPALIVE.get(path, b": keep-alive\n\n")
    await until(lambda: answer.body.count(keepalive) >= 3)
    house.line.say("w", events("w", id, "all "))
    await answer.holds(b'"all "')
    house.line.say("w", events("w", id, "aboard", first=1))
    await answer.holds(b'"aboard"')
    assert not answer.task.done()
    house.line.say("w", finished("w", id, 2))
    await answer.end()
    assert answer.complete
    assert answer.body.endswith(END.get(path, b"}\n\n"))
    assert (b"event: response.completed\n" in answer.body) == (path == RESPONSES)
    assert len(house.line.dispatcher.flights) == 0


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_sends_nothing_before_the_workers_first_message(path: str) -> None:
    # Keepalives of responses are events.
    house = house_with_worker(keepalive_s=60.0 if path == RESPONSES else 0.01)
    answer = house.post(path, stream=True, **BODIES[path])
    id = await house.arrived()
    asked = time.monotonic()
    await until(lambda: time.monotonic() - asked > 0.05)
    assert answer.sent == []
    house.line.say("w", failed("w", id, "context_length_exceeded"))
    assert (await answer.end()).status == 400
    assert "error" in answer.json


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_refusal_by_a_worker_says_when_to_retry(path: str, stream: bool, house: House) -> None:
    answer = house.post(path, stream=stream, **BODIES[path])
    refusal = RequestError(Code.TEXT_GENERATION_BUSY, "No memory.", retry_after_s=5.0)
    house.line.say("w", refused("w", await house.arrived(), refusal))
    assert ((await answer.end()).status, answer.headers["retry-after"]) == (503, "5")


async def test_a_completion_goes_on_with_its_prompts(roomy: House) -> None:
    answer = roomy.text(["Once", "Twice"], n=2)
    await roomy.arrived(4)
    assert [request.prompt for request in roomy.requests()] == ["Once", "Once", "Twice", "Twice"]
    for number, request in enumerate(roomy.requests()):
        roomy.line.say("w", events("w", request.id, f"{number}", ""), finished("w", request.id, 2))
    document = (await answer.end()).json
    assert document["object"] == "text_completion"
    assert [choice["text"] for choice in document["choices"]] == ["0", "1", "2", "3"]
    assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (6, 8)


@pytest.mark.parametrize(
    ("images", "url", "code"),
    [
        (False, data_url(PNG), "unsupported_media"),
        (True, "data:image/png;base64,AAAA", "invalid_media"),
        (True, "https://example.org/cat.png", "invalid_media"),
    ],
)
async def test_an_image_that_cannot_be_served_is_named(images: bool, url: str, code: str) -> None:
    house = house_with_worker(images=images)
    answer = house.chat([{"type": "image_url", "image_url": {"url": url}}])
    assert await answer.refusal() == (400, code, "messages[0].content[0]")
    answer = house.respond([{"role": "user", "content": [{"type": "input_image", "image_url": url}]}])
    assert await answer.refusal() == (400, code, "input[0].content[0]")
    assert house.requests() == []


async def test_an_image_in_a_tool_result_travels_behind_the_request() -> None:
    house = house_with_worker(images=True)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    seen = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    assert (await house.serve(house.message([seen]), "x")).status == 200
    [request] = house.requests()
    assert [media.mime for media in request.media] == ["image/png"]
    assert house.line.media[request.id] == [PNG]
