"""POST /v1/chat/completions, to a worker and back."""

from __future__ import annotations

import base64
import time

import pytest

from protocol.conversation import unpack
from tests.broker.application import House
from tests.broker.asgi import run, until
from tests.factories import accepted, events, failed, finished, reused
from tests.images import picture

PNG = picture()


def test_a_whole_answer_has_its_length_and_its_text(house: House) -> None:
    async def talk() -> None:
        answer = house.chat(model="org/model", temperature=0)
        id = await house.arrived()
        assert unpack(house.requests()[0]).messages == [{"role": "user", "content": "hello"}]
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


def test_stream_sends_nothing_before_the_workers_first_message() -> None:
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
