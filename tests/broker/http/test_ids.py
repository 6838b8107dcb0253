"""Request ids of responses."""

from __future__ import annotations

import re

import pytest

from tests.broker.application import House


async def test_a_request_id_of_the_client_is_echoed(house: House) -> None:
    for given in ("a", "trace-1/2:3", "x" * 128, '{"a":1}'):
        answer = await house.get("/health", x_request_id=given).end()
        assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\tb", "é", "\x7f", "a\r\nset-cookie: b"])
async def test_a_missing_or_insane_request_id_is_replaced(given: str | None, house: House) -> None:
    headers = {} if given is None else {"x_request_id": given}
    ids = [(await house.get("/health", **headers).end()).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch(r"req_[0-9a-f]{24}", id) for id in ids)
    assert ids[0] != ids[1]
