"""Responses in the background: queued, polled, streamed again from any event, cancelled and deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.requests import background
from protocol.types import BACKGROUND_PRIORITY
from tests.broker.application import RESPONSES, House, house_with_worker
from tests.broker.asgi import Exchange, until
from tests.factories import events, finished


async def begun(house: House, **fields: Any) -> Any:
    """Create a response in the background, and return the document that is answered at once."""
    exchange = await house.respond(background=True, **fields).end()
    assert exchange.status == 200
    return exchange.json


async def got(house: House, id: str) -> Any:
    return (await house.get(f"{RESPONSES}/{id}").end()).json


def replay(house: House, id: str, after: int | None = None) -> Exchange:
    query = "?stream=true" + ("" if after is None else f"&starting_after={after}")
    return house.get(f"{RESPONSES}/{id}{query}")


async def test_a_response_is_queued_then_in_progress_then_completed(house: House) -> None:
    document = await begun(house, input="hello")
    assert (document["status"], document["background"], document["output"]) == ("queued", True, [])
    id = await house.arrived()
    assert id == document["id"]
    assert house.requests()[0].priority == BACKGROUND_PRIORITY
    house.begin(id, "all ")
    await until(lambda: house.gateway.answering["", id].so_far()["status"] == "in_progress")
    assert (await got(house, id))["status"] == "in_progress"
    items = (await house.get(f"{RESPONSES}/{id}/input_items").end()).json
    assert items["data"][0]["content"] == [{"type": "input_text", "text": "hello"}]
    house.line.say("w", events("w", id, "aboard", first=1), finished("w", id, 2))
    await until(lambda: not house.gateway.answering)
    document = await got(house, id)
    assert document["status"] == "completed"
    assert document["output"][0]["content"][0]["text"] == "all aboard"
    assert len(house.line.dispatcher.flights) == 0


async def test_events_are_replayed_after_any_number_and_then_live(house: House) -> None:
    first = house.respond(background=True, stream=True)
    id = await house.arrived()
    house.begin(id, "all ")
    await first.holds(b'"delta":"all "')
    first.leave()
    await first.end()
    numbers = [number for number, _ in first.numbered]
    assert numbers == list(range(len(numbers)))
    kinds = [kind for _, kind in first.numbered]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    late = replay(house, id, numbers[-2])
    await late.holds(b'"delta":"all "')
    assert [number for number, _ in late.numbered] == numbers[-1:]
    house.line.say("w", events("w", id, "aboard", first=1), finished("w", id, 2))
    await late.end()
    whole = await replay(house, id).end()
    assert whole.body.startswith(first.body)
    assert whole.body.endswith(late.body)
    for after, (number, _) in enumerate(whole.numbered):
        assert after == number
        rest = await replay(house, id, after).end()
        assert rest.body == b"" or whole.body.endswith(rest.body)
        assert len(rest.numbered) == len(whole.numbered) - after - 1


async def test_events_that_are_no_longer_kept_are_a_conflict_and_never_a_gap() -> None:
    house = house_with_worker(reattach_window_s=0.001)
    id = (await begun(house))["id"]
    house.begin(id, "x")
    await asyncio.sleep(0.002)
    for _ in range(3):
        house.gateway.answers.sweep()
    assert len(house.line.dispatcher.flights) == 1, "it runs on without readers beyond the window"
    house.line.say("w", finished("w", id, 1))
    await until(lambda: house.gateway.answers.sweep() or not len(house.gateway.answers))
    expired = replay(house, id, 2)
    assert await expired.refusal() == (409, "stream_cursor_expired", None)
    assert expired.headers["x-should-retry"] == "false"
    assert (await got(house, id))["status"] == "completed"


async def test_a_malformed_cursor_is_refused_by_name(house: House) -> None:
    id = (await begun(house))["id"]
    for after in ("-1", "x", "1" * 10):
        refused = await house.get(f"{RESPONSES}/{id}?stream=true&starting_after={after}").refusal()
        assert refused == (400, "invalid_request", "starting_after")


async def test_a_full_server_queues_them_behind_what_is_interactive(house: House) -> None:
    house.chat()
    house.chat()
    await house.arrived(2)
    assert (await house.chat().end()).status == 503
    one, two = [(await begun(house, input=text))["id"] for text in ("1", "2")]
    assert len(house.requests()) == 2
    assert house.gateway.deferred.responses == 2
    for request in house.requests():
        house.begin(request.id, "x")
        house.line.say("w", finished("w", request.id, 1))
    await until(lambda: house.gateway.deferred.sweep() or len(house.requests()) == 3)
    assert house.requests()[-1].id == one
    house.begin(one, "x")
    house.line.say("w", finished("w", one, 1))
    assert await house.arrived(4) == two


async def test_their_number_is_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BACKGROUND_MAX", 1)
    await begun(house)
    await begun(house)
    refused = await house.respond(background=True).end()
    assert (refused.status, refused.error["code"]) == (503, "text_generation_busy")
    assert "retry-after" in refused.headers


async def test_cancelling_is_idempotent(house: House) -> None:
    running, queued = [(await begun(house))["id"] for _ in range(2)]
    house.begin(running, "all ")
    for id in (running, queued, running, queued):
        cancelled = await house.get(f"{RESPONSES}/{id}/cancel", method="POST").end()
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        assert (await got(house, id))["status"] == "cancelled"
    await until(lambda: not house.gateway.answering)
    assert house.cancels()[0] == running
    house.gateway.deferred.sweep()
    assert house.gateway.deferred.responses == 0
    assert len(house.line.dispatcher.flights) == 0


async def test_a_response_can_be_deleted_while_it_runs(house: House) -> None:
    id = (await begun(house))["id"]
    house.begin(id, "all ")
    assert (await house.get(f"{RESPONSES}/{id}", method="DELETE").end()).json["deleted"]
    await until(lambda: not len(house.line.dispatcher.flights))
    for path in (f"{RESPONSES}/{id}", f"{RESPONSES}/{id}?stream=true"):
        assert (await house.get(path).end()).status == 404
    assert house.cancels() == [id]


async def test_one_that_waits_for_too_long_fails(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    _, queued = [(await begun(house))["id"] for _ in range(2)]
    monkeypatch.setattr(background, "WAIT_S_MAX", -1.0)
    house.gateway.deferred.sweep()
    failed = await got(house, queued)
    assert (failed["status"], failed["error"]["message"]) == ("failed", "No row was free for a day.")
    assert house.gateway.deferred.responses == 0
