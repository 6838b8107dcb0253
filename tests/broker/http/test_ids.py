"""Request ids of responses."""

from __future__ import annotations

import re

import pytest

from tests.broker.application import CHAT, House
from tests.broker.asgi import run
from tests.factories import accepted, reused


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
