"""GET /v1/inspect: the latest requests as received, with `--inspect` only."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from broker.dispatch import inspection
from broker.dispatch.flight import Flight
from broker.dispatch.inspection import CapturedRequest, Inspection
from protocol.types import TokenizeOptions
from tests.broker.application import CHAT, House, house_with_worker
from tests.factories import accepted, events, finished, reused


@pytest.fixture
def inspected() -> Iterator[House]:
    house = house_with_worker(inspect=True)
    yield house
    house.close()


async def answered(house: House, content: str, **fields: object) -> str:
    """Serve a chat request to its end, and return its id."""
    before = len(house.requests())
    exchange = house.chat(content, **fields)
    id = await house.arrived(before + 1)
    said = [accepted("w", id), reused("w", id, tokens=2, tier="ram", miss="diverged")]
    house.line.say("w", *said, events("w", id, "fine ", "day"), finished("w", id, tokens=2))
    assert (await exchange.end()).status == 200
    return id


async def test_requests_are_not_captured_unless_inspection_is_enabled(house: House) -> None:
    id = await answered(house, "secret")
    told = (await house.get("/v1/inspect").end()).json
    assert told == {"object": "list", "enabled": False, "data": []}
    assert await house.get(f"/v1/inspect/{id}").refusal() == (404, "route_not_found", None)


async def test_the_last_requests_are_told_of_the_latest_first(inspected: House) -> None:
    first, second = await answered(inspected, "one"), await answered(inspected, "two")
    told = (await inspected.get("/v1/inspect").end()).json
    assert [each["id"] for each in told["data"]] == [second, first]
    assert (await inspected.get("/v1/status").end()).json["gateway"]["captured"] == [first, second]
    latest = told["data"][0]
    assert (latest["path"], latest["model"], latest["code"]) == (CHAT, "org/model", "stop")
    assert (latest["prompt_tokens"], latest["answered"]) == (3, 2)
    assert latest["reuse"] == {"tokens": 2, "tier": "ram", "miss": "diverged"}
    assert "two" not in str(told)
    scoring = inspected.text([7, 8], echo=True, logprobs=1, max_tokens=0)
    await inspected.arrived(3)
    assert (await inspected.get("/v1/inspect").end()).json == told
    scoring.leave()


async def test_one_is_told_as_it_came_and_as_its_model_was_given_it(inspected: House) -> None:
    id = await answered(inspected, "one", temperature=0.5)
    asked = inspected.get(f"/v1/inspect/{id}")
    wanted = await inspected.arrived(2)
    original, again = inspected.requests()
    assert again.tokenizing == TokenizeOptions(tokens=True)
    assert again.messages == original.messages
    said = accepted("w", wanted, tokens=[7, 8, 9])
    inspected.line.say("w", said, finished("w", wanted))
    told = (await asked.end()).json
    assert msgspec.json.decode(told["body"])["temperature"] == 0.5
    assert told["prompt"] == {"tokens": [7, 8, 9]}
    assert told["answer"] == {"tokens": [0, 1]}
    # The inspection request itself is not captured.
    assert len((await inspected.get("/v1/inspect").end()).json["data"]) == 1


async def test_captured_requests_require_the_api_key() -> None:
    keyed = House(inspect=True, api_keys=("sesame",))
    for path in ("/v1/inspect", "/v1/inspect/chatcmpl-1"):
        assert (await keyed.get(path).end()).status == 401


def kept(id: str, nbytes: int) -> CapturedRequest:
    flight = SimpleNamespace(id=id, media=(bytes(nbytes - 10),))
    return CapturedRequest("/v1/chat/completions", bytes(10), cast(Flight, flight), cast(Any, None))


def test_captured_requests_are_limited_by_bytes_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "KEPT_BYTES_MAX", 100)
    some = Inspection()
    for number in range(5):
        some._keep(kept(str(number), 40))
    assert [each.flight.id for each in some.kept] == ["3", "4"]
    some._keep(kept("large", 1000))
    assert [each.flight.id for each in some.kept] == ["large"]
    for number in range(inspection.KEPT_MAX + 3):
        some._keep(kept(str(number), 10))
    assert len(some.kept) == 10
    assert some.find("large") is None
    assert some.find("34") is not None
