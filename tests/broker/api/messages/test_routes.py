"""POST /v1/messages and /v1/messages/count_tokens, to a worker and back."""

from __future__ import annotations

from typing import Any

from protocol.types import TokenizeOptions
from tests.broker.application import MESSAGES, House
from tests.broker.asgi import Exchange
from tests.factories import accepted, finished

HI = [{"role": "user", "content": "hello"}]


def error_of(answer: Exchange) -> dict[str, Any]:
    """Return the error object of a refusal, after its envelope is checked."""
    document = answer.json
    assert document.keys() == {"type", "error", "request_id"}
    assert document["type"] == "error"
    assert document["error"].keys() == {"type", "message"}
    assert document["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return dict(document["error"])


async def test_refusals_of_every_kind_have_anthropics_envelope(house: House) -> None:
    for exchange, status, kind, words in (
        (house.message(temperature=9), 400, "invalid_request_error", "temperature"),
        (house.message(model="nobody"), 404, "not_found_error", "nobody"),
        (house.get(MESSAGES), 405, "invalid_request_error", "GET"),
        (house.post(MESSAGES + "/batches"), 404, "not_found_error", ""),
        (house.post(MESSAGES + "/count_tokens", messages=[]), 400, "invalid_request_error", "messages"),
    ):
        error = error_of(await exchange.end())
        assert (exchange.status, error["type"], words in error["message"]) == (status, kind, True)
    assert (await house.get("/", "HEAD").end()).headers["request-id"]  # the server drops the body


async def test_tokens_are_counted_without_a_run_and_say_nothing_of_caches(house: House) -> None:
    answer = house.post(MESSAGES + "/count_tokens", model="org/model", messages=HI, system="S")
    id = await house.arrived()
    assert house.requests()[0].tokenizing == TokenizeOptions()
    house.line.say("w", accepted("w", id, prompt_tokens=12), finished("w", id))
    assert (await answer.end()).json == {"input_tokens": 12}
    assert "x-roundhouse-cache" not in answer.headers
    assert len(house.line.dispatcher.flights) == 0
