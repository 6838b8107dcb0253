"""Images of a request: fetched, kept for its worker, and freed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from broker.dialects.data_urls import MediaError
from broker.requests.media import FETCHES_PER_REQUEST_MAX
from tests.broker.application import House, house_with_worker
from tests.broker.asgi import Exchange, until
from tests.factories import accepted, events, finished
from tests.images import data_url, noise, picture

RED, BLUE = picture("red"), picture("blue")
LARGE = noise((400, 300))
ROOM = 200_000
BOUNDS = {"waiting_max": 8, "media_memory": ROOM, "media_bytes_max": ROOM}


class Elsewhere:
    """Fetcher that answers at once, or when `may_answer` is set."""

    def __init__(self, pages: dict[str, bytes]) -> None:
        self.pages = pages
        self.asked: list[str] = []
        self.under_way = 0
        self.most = 0
        self.cancelled = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, url: str, expect: Callable[[int], None]) -> bytes:
        self.asked.append(url)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.may_answer.wait()
            await asyncio.sleep(0)
            if (data := self.pages.get(url)) is None:
                raise MediaError("its host cannot be reached")
            expect(len(data))
            return data
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1


PAGES = {"https://a/red": RED, "https://a/blue": BLUE, "https://a/large": LARGE, "https://a/text": b"hello"}


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere(PAGES)


@pytest.fixture
def house(elsewhere: Elsewhere) -> Any:
    house = house_with_worker(images=True, fetch=elsewhere, **BOUNDS)
    yield house
    house.close()
    assert house.gateway.media.held == 0
    assert len(house.gateway.media) == 0


def seeing(house: House, *urls: str, **fields: object) -> Exchange:
    return house.chat([{"type": "image_url", "image_url": {"url": url}} for url in urls], **fields)


def finish(house: House) -> None:
    for request in house.requests():
        house.line.say(
            "w", accepted("w", request.id), events("w", request.id, "x"), finished("w", request.id)
        )


async def test_inline_and_remote_images_preserve_their_order(house: House, elsewhere: Elsewhere) -> None:
    answer = seeing(house, "https://a/blue", data_url(RED), "https://a/red", "https://a/blue")
    id = await house.arrived()
    assert house.line.media[id] == [BLUE, RED, RED, BLUE]
    [request] = house.requests()
    assert [media.param for media in request.media] == [f"messages[0].content[{n}]" for n in range(4)]
    assert sorted(elsewhere.asked) == ["https://a/blue", "https://a/red"]
    assert house.gateway.media.held == len(RED) + len(BLUE)
    finish(house)
    assert (await answer.end()).status == 200


async def test_concurrent_fetches_of_one_request_are_limited(house: House, elsewhere: Elsewhere) -> None:
    urls = [f"https://a/{n}" for n in range(3 * FETCHES_PER_REQUEST_MAX)]
    elsewhere.pages |= dict.fromkeys(urls, RED)
    answer = seeing(house, *urls, data_url(LARGE))
    await house.arrived()
    finish(house)
    assert (await answer.end()).status == 200
    assert 1 < elsewhere.most <= FETCHES_PER_REQUEST_MAX


async def test_all_answers_to_one_request_share_its_images(house: House) -> None:
    answer = seeing(house, data_url(LARGE), n=4)
    other = seeing(house, "https://a/large")
    await house.arrived(5)
    assert house.gateway.media.held == len(LARGE)
    frames = [frame for flight in house.gateway.dispatcher.flights for frame in flight.media]
    assert len(frames) == 5
    assert {id(frame) for frame in frames} == {id(frames[0])}
    finish(house)
    assert (await answer.end()).status == (await other.end()).status == 200


async def test_a_request_that_finds_no_room_for_its_images_is_refused_at_once(house: House) -> None:
    most = ROOM // len(LARGE)
    others = [noise((400, 300 - n)) for n in range(1, most + 1)]
    assigned = [seeing(house, data_url(image)) for image in others]
    await house.arrived(len(others))
    refused = await seeing(house, data_url(LARGE)).end()
    assert (refused.status, refused.error["code"]) == (503, "text_generation_busy")
    assert "images" in refused.error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert (await seeing(house, "https://a/large").end()).status == 503
    same = seeing(house, data_url(others[0]))
    await house.arrived(len(others) + 1)
    finish(house)
    for exchange in (*assigned, same):
        assert (await exchange.end()).status == 200
    later = seeing(house, data_url(LARGE))
    await house.arrived(len(others) + 2)
    later.leave()
    await later.end()


async def test_images_that_never_find_room_together_are_the_requests_own_fault(house: House) -> None:
    images = [data_url(noise((400, 300 - n))) for n in range(ROOM // len(LARGE) + 1)]
    refused = await seeing(house, *images).refusal()
    assert refused == (400, "invalid_request", f"messages[0].content[{len(images) - 1}]")
    assert house.requests() == []


async def test_an_image_is_held_over_the_death_of_its_worker(house: House) -> None:
    answer = seeing(house, "https://a/red", stream=True)
    first = await house.arrived()
    house.line.say("w", accepted("w", first), events("w", first, "x"))
    await answer.holds(b'"x"')
    house.line.dispatcher.lost("w")
    assert house.gateway.media.held == len(RED)
    house.line.serving("v", "org/model", images=True)
    await until(lambda: house.requests("v"))
    [second] = house.requests("v")
    assert house.line.media[second.id] == [RED]
    assert second.resume != []
    house.line.say("v", accepted("v", second.id), finished("v", second.id, 1))
    assert (await answer.end()).status == 200


async def test_the_worst_of_several_fetches_is_told_and_the_others_end(
    house: House, elsewhere: Elsewhere
) -> None:
    for url in ("https://a/gone", "https://a/text"):
        refused = await seeing(house, "https://a/red", url, "https://a/large").refusal()
        assert refused == (400, "invalid_media", "messages[0].content[1]")
    assert elsewhere.under_way == 0


async def test_a_slow_fetch_ends_in_time_and_holds_nobody_up(elsewhere: Elsewhere) -> None:
    house = house_with_worker(images=True, fetch=elsewhere, media_timeout_s=0.2, **BOUNDS)
    elsewhere.may_answer.clear()
    slow = seeing(house, data_url(RED), "https://a/blue")
    await until(lambda: elsewhere.under_way)
    assert len(house.gateway.dispatcher.flights) == 0
    quick = house.chat()
    await house.arrived()
    finish(house)
    assert (await quick.end()).status == 200
    assert await slow.refusal() == (400, "invalid_media", "messages[0].content[1]")
    assert "0.2 s" in slow.error["message"]
    assert (elsewhere.under_way, elsewhere.cancelled) == (0, 1)
