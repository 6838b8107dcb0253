"""Responses: headers, body limits and disconnecting clients."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest
from hypothesis import given
from hypothesis.strategies import DataObject, binary, data, integers, just, lists

from broker.answers import answer as answer_module
from broker.dispatch import flight as flight_module
from broker.requests.answer_response import StreamCursor
from tests.broker.application import CHAT, MESSAGES, SAID, House, house_with_worker
from tests.broker.asgi import Exchange
from tests.factories import accepted, events, failed, finished, reused

CACHE = "x-roundhouse-cache"
RELAXED = "x-roundhouse-schema-relaxed"


@pytest.mark.parametrize("stream", [False, True])
async def test_response_header_names_what_was_relaxed_in_every_dialect(stream: bool, house: House) -> None:
    for number, ask in enumerate((house.chat, house.text, house.respond, house.message)):
        for relaxed, header in ((["uniqueItems", "oneOf"], "oneOf, uniqueItems"), ([], None)):
            answer = ask(stream=stream)
            id = await house.arrived(2 * number + (1 if relaxed else 2))
            house.line.say("w", accepted("w", id, relaxed=relaxed), reused("w", id))
            house.line.say("w", events("w", id, "x"), finished("w", id, 1))
            await answer.end()
            assert (answer.status, answer.headers.get(RELAXED)) == (200, header), ask.__name__


async def test_a_stream_of_a_worker_that_does_not_say_begins_with_its_text(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "HEADERS_HELD_S_MAX", 600.0)
    answer = house.chat(stream=True)
    id = await house.arrived()
    house.line.say("w", accepted("w", id), events("w", id, "x"))
    await answer.holds(b'"x"')
    assert CACHE not in answer.headers
    house.line.say("w", finished("w", id))
    assert (await answer.end()).body.endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_waits_in_the_queue_begins_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "HEADERS_HELD_S_MAX", 0.01)
    answer = house.chat(stream=True)
    id = await house.arrived()
    house.line.say("w", accepted("w", id))
    await answer.holds(b'"role":"assistant"')
    assert (answer.status, CACHE in answer.headers) == (200, False)
    house.line.say("w", reused("w", id), events("w", id, "x"), finished("w", id))
    await answer.end()
    assert answer.body.count(b'"role"') == answer.body.count(b'"x"') == 1
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_document_has_the_header_that_is_known_at_its_end(
    key: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "HEADERS_HELD_S_MAX", 0.001)
    answer = house.keyed(CHAT, key, messages=SAID) if key else house.chat()
    id = await house.arrived()
    house.line.say("w", accepted("w", id))
    await asyncio.sleep(0.01)
    house.line.say("w", reused("w", id, 1), events("w", id, "x"), finished("w", id, 1))
    await answer.end()
    assert answer.headers[CACHE].startswith("hit=1/")
    assert len(house.gateway.answers) == bool(key)


@pytest.mark.parametrize("leaves", [False, True])
async def test_failure_while_headers_are_delayed_is_handled_as_before_the_first_token(
    leaves: bool, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "HEADERS_HELD_S_MAX", 600.0)
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
    assert len(house.line.dispatcher.flights) == 0


async def test_errors_use_the_format_of_the_requested_api_whoever_raises_them(house: House) -> None:
    failing = house.message()
    house.line.say("w", failed("w", await house.arrived()))
    keyed = House(api_keys=("rh-one",))
    for refused in (failing, house.message(temperature=9), house.get(MESSAGES), keyed.message()):
        assert (await refused.end()).json["type"] == "error"
    assert (await house.chat(temperature=9).end()).error["code"] == "invalid_request"
    assert (await keyed.chat().end()).error["code"] == "invalid_api_key"


# --- bodies ------------------------------------------------------------------------------------------


async def test_a_body_that_is_declared_or_grows_too_large_is_refused_and_read_no_further() -> None:
    house = House(body_bytes_max=1024)
    # The body never arrives, so reading it would never end.
    declared = Exchange(house.app, "POST", CHAT, None, [(b"content-length", b"1025")])
    grown = Exchange(house.app, "POST", CHAT, [b"[" * 512, b"[" * 512, b"[", *[b"["] * 100])
    for answer in (declared, grown):
        await answer.end()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert declared.headers["connection"] == "close"
    assert grown.unread == 100


async def test_a_body_of_the_largest_size_is_taken_and_a_client_may_leave_while_it_sends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    house = house_with_worker(body_bytes_max=len(body))
    with caplog.at_level(logging.WARNING):
        left = Exchange(house.app, "POST", CHAT, None)
        left.leave()
        await left.end()
    assert (caplog.records, house.requests()) == ([], [])
    pieces = [body[n : n + 7] for n in range(0, len(body), 7)]
    answer = Exchange(house.app, "POST", CHAT, pieces, [(b"content-length", b"%d" % len(body))])
    house.line.say("w", finished("w", await house.arrived()))
    assert (await answer.end()).status == 200


# --- disconnecting clients ---------------------------------------------------------------------------


@pytest.mark.parametrize(("stream", "begun"), [(False, False), (False, True), (True, True)])
async def test_a_client_that_leaves_frees_its_row(stream: bool, begun: bool, house: House) -> None:
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
    assert len(house.line.dispatcher.flights) == 0


async def test_an_exchange_that_is_cancelled_frees_its_row(house: House) -> None:
    answer = house.chat(stream=True)
    id = await house.arrived()
    answer.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer.end()
    assert house.cancels() == [id]
    assert len(house.line.dispatcher.flights) == 0


async def test_a_client_that_does_not_read_loses_its_stream_and_costs_no_more(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_module, "PENDING_DELTAS_MAX", 50)
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


# --- reading on --------------------------------------------------------------------------------------


@given(data())
def test_a_cursor_skips_events_or_bytes_however_the_stream_is_cut(dice: DataObject) -> None:
    keepalive = b": keep-alive\n\n"
    event = binary(max_size=3).map(lambda body: b"data: " + body.hex().encode() + b"\n\n")
    parts = dice.draw(lists(lists(event | just(keepalive), max_size=4), max_size=4))
    whole = [part for each in parts for part in each]
    count = dice.draw(integers(0, len(whole) + 1))
    real = [place for place, each in enumerate(whole) if each != keepalive]
    first = 0 if not count else real[count - 1] + 1 if count <= len(real) else len(whole)
    cursor = StreamCursor(events=count)
    assert b"".join(cursor.skip(b"".join(each), keepalive) for each in parts) == b"".join(whole[first:])
    nbytes = dice.draw(integers(0, 99))
    cursor = StreamCursor(nbytes=nbytes)
    assert b"".join(cursor.skip(b"".join(each), keepalive) for each in parts) == b"".join(whole)[nbytes:]


def test_a_cursor_far_into_a_long_stream_costs_time_in_proportion() -> None:
    began = time.process_time()
    assert StreamCursor(events=200_000).skip(b"data: x\n\n" * 200_000, b"") == b""
    assert time.process_time() - began < 2  # a copy of the rest for each event takes ten times that
