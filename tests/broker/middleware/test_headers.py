"""Headers of every answer: its id, its time, and what remains of a limit."""

from __future__ import annotations

import re
import time

import pytest

from broker.middleware.limits import LIMITS, REMAINING
from tests.broker.application import House, house_with_worker
from tests.broker.asgi import until
from tests.factories import accepted, finished

ANN, BOB = "rh-ann-12345678", "rh-bob-12345678"


def told(headers: dict[str, str]) -> tuple[set[str], set[str]]:
    """Return the limit and the remaining requests, under both header names."""
    limit, remaining = ({headers[name.decode()] for name in names} for names in (LIMITS, REMAINING))
    return limit, remaining


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_what_remains_while_it_is_given(stream: bool) -> None:
    house = house_with_worker(per_key_max=2, waiting_max=8, api_keys=(ANN, BOB))
    first = house.respond(key=ANN, stream=stream)
    id = await house.arrived()
    second = house.respond(key=ANN)
    other = await house.arrived(2)
    refused = await house.respond(key=ANN).end()
    assert (refused.status, told(refused.headers)) == (429, ({"2"}, {"0"}))
    house.line.say("w", accepted("w", id), finished("w", id))
    assert told((await first.end()).headers) == ({"2"}, {"0"})
    house.line.say("w", accepted("w", other), finished("w", other))
    assert told((await second.end()).headers) == ({"2"}, {"1"})
    assert told((await house.get("/v1/models", x_api_key=BOB).end()).headers) == ({"2"}, {"2"})


async def test_without_a_limit_or_a_key_nothing_is_said() -> None:
    for house in (House(api_keys=(ANN,)), House(per_key_max=1)):
        answer = await house.get("/v1/models", x_api_key=ANN).end()
        assert answer.status == 200
        assert not [name for name in answer.headers if "ratelimit" in name]


async def test_a_request_id_is_echoed_unless_it_is_missing_or_insane(
    house: House,
) -> None:
    async def ids(**headers: str) -> list[str]:
        return [(await house.get("/health", **headers).end()).headers["x-request-id"] for _ in range(2)]

    for given in ("a", "trace-1/2:3", "x" * 128, '{"a":1}'):
        assert await ids(x_request_id=given) == [given] * 2
    for insane in ("", "x" * 129, "a b", "a\tb", "é", "\x7f", "a\r\nset-cookie: b"):
        made = {*await ids(x_request_id=insane), *await ids()}
        assert len(made) == 4
        assert all(re.fullmatch(r"req_[0-9a-f]{24}", id) for id in made)


async def test_every_answer_says_after_how_many_milliseconds_it_began(house: House) -> None:
    answer = house.chat()
    id = await house.arrived()
    asked = time.monotonic()
    await until(lambda: time.monotonic() - asked > 0.05)
    house.line.say("w", accepted("w", id), finished("w", id))
    assert int((await answer.end()).headers["openai-processing-ms"]) >= 50
    refused = await house.get("/v1/nothing").end()
    assert refused.headers["openai-processing-ms"].isdigit()
