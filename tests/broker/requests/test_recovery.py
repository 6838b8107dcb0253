"""Recovery: a gateway that reads the journal of another one renders the same bytes and goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from broker.dispatch import dispatcher
from broker.journal.file import JournalFile, Put
from protocol.messages import StepOutputs
from tests.broker import application
from tests.broker.application import CHAT, RESPONSES, SAID, TEXT, House
from tests.broker.asgi import run, until
from tests.factories import accepted, delta, failed, finished

BODIES = application.BODIES | {
    CHAT: {"messages": SAID, "logprobs": True, "stream_options": {"include_usage": True}},
    TEXT: {"prompt": ["Once", "Twice"], "n": 2, "echo": True},
}


def lives(folder: Path, *talks: Callable[[House], Awaitable[None]]) -> None:
    """Run each talk in a gateway of its own, which is killed after it."""

    async def life(talk: Callable[[House], Awaitable[None]]) -> None:
        house = House(journal=folder, waiting_max=8)
        house.recover()
        house.line.serving("w", "org/model", rows=8)
        try:
            await talk(house)
        finally:
            house.die()

    for talk in talks:
        run(life(talk))


async def settled(house: House) -> None:
    """Wait until everything that was rendered is in the journal's queue."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_finished_answer_is_the_same_in_the_next_gateway(path: str, stream: bool, tmp_path: Path) -> None:
    body = BODIES[path] | {"stream": stream}
    if not stream:
        body.pop("stream_options", None)
    bodies: list[bytes] = []

    async def first(house: House) -> None:
        exchange = house.keyed(path, "k", **body)
        await house.arrived(4 if path == TEXT else 1)
        for request in house.requests():
            house.begin(request.id, "all ", "aboard", cached=1)
            house.line.say("w", finished("w", request.id, 2, cached=1))
        bodies.append((await exchange.end()).body)

    async def second(house: House) -> None:
        exchange = await house.keyed(path, "k", **body).end()
        bodies.append(exchange.body)
        assert exchange.headers["x-roundhouse-cache"].startswith("hit=")
        assert house.requests() == []

    lives(tmp_path, first, second, second)
    assert bodies[0] == bodies[1] == bodies[2]


@pytest.mark.parametrize("path", BODIES)
def test_an_unfinished_answer_goes_on_from_its_tokens_behind_the_same_bytes(
    path: str, tmp_path: Path
) -> None:
    body = BODIES[path] | {"stream": True}
    beginnings: list[bytes] = []

    async def first(house: House) -> None:
        exchange = house.keyed(path, "k", **body)
        await house.arrived(4 if path == TEXT else 1)
        requests = house.requests()
        for request in requests:
            house.begin(request.id, "all ")
        house.line.say("w", finished("w", requests[0].id, 1)) if path == TEXT else None
        await exchange.holds(b"all ")
        await settled(house)
        beginnings.append(exchange.body)
        exchange.leave()
        await exchange.end()

    async def second(house: House) -> None:
        exchange = house.keyed(path, "k", **body)
        await house.arrived(3 if path == TEXT else 1)
        for request in house.requests():
            assert request.resume == [0]
            assert request.incarnation == house.line.dispatcher.incarnation
            more = delta("aboard", request.id, tokens=[1])
            house.line.say("w", accepted("w", request.id), StepOutputs(incarnation="w", deltas=[more]))
            house.line.say("w", finished("w", request.id, 2))
        await exchange.end()
        assert exchange.body.startswith(beginnings[0])
        assert exchange.body.count(b"aboard") >= len(house.requests())
        assert len(house.line.dispatcher.flights) == 0

    lives(tmp_path, first, second)


def test_what_was_queued_in_the_background_is_queued_again_in_its_order(tmp_path: Path) -> None:
    ids: list[str] = []

    async def first(house: House) -> None:
        house.line.dispatcher.lost("w")
        house.line.serving("w", "org/model", rows=1)
        for _ in range(3):
            ids.append((await house.respond(background=True).end()).json["id"])
        assert len(house.requests()) == 1

    async def second(house: House) -> None:
        assert {(await house.get(f"{RESPONSES}/{id}").end()).json["status"] for id in ids} == {"queued"}
        await until(lambda: house.gateway.deferred.sweep() or len(house.requests()) == 3)
        assert [request.id.partition("~")[0] for request in house.requests()] == ids

    lives(tmp_path, first, second)


def test_a_conversation_is_extended_once(tmp_path: Path) -> None:
    made: list[str] = []

    async def first(house: House) -> None:
        conversation = (await house.post("/v1/conversations").end()).json["id"]
        exchange = house.keyed(RESPONSES, "k", input="hello", conversation=conversation, background=True)
        await house.serve(exchange, "x")
        await until(lambda: not house.gateway.answering)
        made.append(conversation)

    async def second(house: House) -> None:
        items = (await house.get(f"/v1/conversations/{made[0]}/items").end()).json["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]

    lives(tmp_path, first, second, second)


def test_stored_responses_are_there_until_they_are_deleted(tmp_path: Path) -> None:
    ids: list[str] = []

    async def first(house: House) -> None:
        for number in range(2):
            exchange = house.respond(f"{number}", **({"previous_response_id": ids[0]} if ids else {}))
            ids.append((await house.serve(exchange, f"answer {number}")).json["id"])

    async def second(house: House) -> None:
        items = (await house.get(f"{RESPONSES}/{ids[1]}/input_items?order=asc").end()).json["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
        assert (await house.get(f"{RESPONSES}/{ids[0]}", method="DELETE").end()).status == 200

    async def third(house: House) -> None:
        assert (await house.get(f"{RESPONSES}/{ids[0]}").end()).status == 404
        assert (await house.get(f"{RESPONSES}/{ids[1]}").end()).json["status"] == "completed"

    lives(tmp_path, first, second, third)


@pytest.mark.parametrize("how", ["failed", "abandoned", "deleted", "too late"])
def test_nothing_is_restored_that_nobody_can_come_back_for(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first(house: House) -> None:
        if how == "deleted":
            id = (await house.respond(background=True).end()).json["id"]
            await house.get(f"{RESPONSES}/{id}", method="DELETE").end()
            return
        exchange = house.keyed(CHAT, "k", messages=SAID, stream=True)
        id = await house.arrived()
        house.begin(id, "x")
        await exchange.holds(b'"x"')
        if how == "failed":
            house.line.say("w", failed("w", id, "engine_error"))
        else:
            exchange.leave()
        await exchange.end()
        if how == "abandoned":
            house.gateway.answers.window_s = 0.0
            house.gateway.answers.sweep()
            await settled(house)

    async def second(house: House) -> None:
        assert len(house.gateway.answers) == 0
        assert len(house.line.dispatcher.flights) == 0

    lives(tmp_path, first)
    if how == "too late":
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 61)
    lives(tmp_path, second)


def test_a_gateway_that_is_stopped_leaves_its_answers_to_the_next_one(tmp_path: Path) -> None:
    async def first(house: House) -> None:
        exchange = house.keyed(CHAT, "k", messages=SAID, stream=True)
        id = await house.arrived()
        house.begin(id, "all ")
        await exchange.holds(b"all ")
        house.line.dispatcher.stop()
        house.line.dispatcher.fail_all()
        assert b"shutting_down" in (await exchange.end()).body

    async def second(house: House) -> None:
        exchange = house.keyed(CHAT, "k", messages=SAID, stream=True)
        id = await house.arrived()
        house.line.say("w", StepOutputs(incarnation="w", deltas=[delta("aboard", id)]), finished("w", id, 2))
        chunks = (await exchange.end()).documents
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "all aboard"

    lives(tmp_path, first, second)


def test_answers_beyond_what_can_be_restored_at_once_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first(house: House) -> None:
        exchanges = [house.keyed(CHAT, key, messages=SAID, stream=True) for key in "ab"]
        await house.arrived(2)
        for request in house.requests():
            house.begin(request.id, "all ")
        for exchange in exchanges:
            await exchange.holds(b"all ")

    async def second(house: House) -> None:
        assert len(house.line.dispatcher.flights) == 1
        assert house.gateway.deferred.responses == 1
        await house.arrived()
        house.line.say("w", finished("w", house.requests()[0].id, 1))
        await until(lambda: not house.gateway.deferred.responses)
        assert len(house.line.dispatcher.flights) == 1

    lives(tmp_path, first)
    monkeypatch.setattr(dispatcher, "RESTORED_FLIGHTS_MAX", 1)
    lives(tmp_path, second)


def test_a_served_model_does_not_give_way_in_a_full_journal(tmp_path: Path) -> None:
    lives(tmp_path, settled)
    file = JournalFile(tmp_path / "journal" / "journal.sqlite", 2**30, time.time())
    assert [(entry.name, entry.ended) for entry in file.entries("served")] == [
        (("served", "org/model"), False)
    ]
    file.close()


def test_an_entry_of_another_version_is_dropped(tmp_path: Path) -> None:
    async def first(house: House) -> None:
        house.gateway.journal.add(Put(("answer", "a"), b"\xc1"))
        house.gateway.journal.add(Put(("response", ":resp_a"), b"\xc1"))

    async def second(house: House) -> None:
        assert len(house.gateway.answers) == 0
        assert (await house.get(f"{RESPONSES}/resp_a").end()).status == 404

    async def third(house: House) -> None:
        assert house.gateway.journal.status().entries == 2  # that of the served model, and the response

    lives(tmp_path, first, second, third)
