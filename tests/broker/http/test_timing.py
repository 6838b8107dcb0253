"""Timing header: the time until the answer began."""

from __future__ import annotations

import time

from tests.broker.application import House
from tests.broker.asgi import until
from tests.factories import accepted, finished


async def test_every_answer_says_after_how_many_milliseconds_it_began(house: House) -> None:
    answer = house.chat()
    id = await house.arrived()
    asked = time.monotonic()
    await until(lambda: time.monotonic() - asked > 0.05)
    house.line.say("w", accepted("w", id), finished("w", id))
    assert int((await answer.end()).headers["openai-processing-ms"]) >= 50
    refused = await house.get("/v1/nothing").end()
    assert refused.headers["openai-processing-ms"].isdigit()
