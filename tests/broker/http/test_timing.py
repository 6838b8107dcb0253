"""How long an answer took to begin is said in its headers."""

from __future__ import annotations

import time

from tests.broker.asgi import run, until
from tests.broker.dispatching import accepted, finished
from tests.broker.house import House


def test_every_answer_says_after_how_many_milliseconds_it_began(house: House) -> None:
    async def talk() -> None:
        answer = house.chat()
        id = await house.arrived()
        asked = time.monotonic()
        await until(lambda: time.monotonic() - asked > 0.05)
        house.line.say("w", accepted("w", id), finished("w", id))
        assert int((await answer.end()).headers["openai-processing-ms"]) >= 50
        refused = await house.get("/v1/nothing").end()
        assert refused.headers["openai-processing-ms"].isdigit()

    run(talk())
