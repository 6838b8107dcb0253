"""What operators see of the gateway."""

from __future__ import annotations

from protocol.parts import RowStatus
from tests.broker.asgi import run
from tests.broker.house import House


def test_the_status_names_workers_and_their_requests(house: House) -> None:
    async def talk() -> None:
        row = RowStatus(id="chatcmpl-1", phase="prefill", prompt_tokens=100, prefilled=64, seconds=0.5)
        house.line.beat("w", running=1, steps=3, rows=[row])
        answer = (await house.get("/v1/status").end()).json
        assert answer["gateway"]["uptime_s"] >= 0
        [worker] = answer["workers"]
        assert (worker["model"], worker["state"], worker["steps"]) == ("org/model", "ready", 3)
        assert [(row["id"], row["prefilled"]) for row in worker["rows"]] == [("chatcmpl-1", 64)]

    run(talk())


def test_the_status_counts_what_went_wrong_on_the_line(house: House) -> None:
    async def talk() -> None:
        house.link.errors["decode"] += 1
        answer = (await house.get("/v1/status").end()).json
        assert answer["gateway"]["line_errors"] == {"decode": 1}

    run(talk())
