"""Access log of requests, with their content only where configured."""

from __future__ import annotations

import json
import logging

import pytest

from broker.requests.access_log import PROMPT_CHARS_MAX, log_prompts
from protocol.common.log_context import fields_of
from protocol.conversation import pack
from protocol.messages import PrefixHit, Rank
from protocol.types import PrefixReuse
from tests import factories
from tests.broker.application import House, house_with_worker
from tests.broker.asgi import until
from tests.factories import GATEWAY, accepted, finished, request

SECRET = "the secret words"


async def test_an_end_is_told_with_both_ids_and_all_counts_but_no_text(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await house.serve(house.chat(SECRET), "x", "y", cached=1)
    [id] = [request.id for request in house.requests()]
    [end] = [fields for record in caplog.records if (fields := fields_of(record)).get("id") == id]
    assert end["request_id"].startswith("req_")
    assert (end["status"], end["code"], end["model"], end["resumes"]) == (200, "stop", "org/model", 0)
    assert (end["prompt_tokens"], end["completion_tokens"], end["cached_tokens"]) == (3, 2, 1)
    assert end["seconds"] >= end["time_to_first_token_s"]
    assert end["key"] is None
    assert SECRET not in caplog.text


async def test_the_message_that_was_not_cached_is_named(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    exchange = house.chat(SECRET)
    await until(house.requests)
    [asked] = house.requests()
    reuse = PrefixReuse(tokens=1, miss="diverged_at_1", message=0, role="system")
    house.line.say("w", accepted("w", asked.id), PrefixHit(incarnation="w", id=asked.id, reuse=reuse))
    house.line.say("w", finished("w", asked.id))
    await exchange.end()
    said = "; 1 prompt tokens cached: no cached prompt continues with message 0 (system)"
    assert any(record.getMessage().endswith(said) for record in caplog.records)


async def test_prompts_are_in_the_log_where_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    house = house_with_worker(log_prompts=True)
    await house.serve(house.chat(SECRET), "x")
    [id] = [request.id for request in house.requests()]
    [line] = [record.getMessage() for record in caplog.records if " asks: " in record.getMessage()]
    assert json.loads(line.removeprefix(f"{id} asks: ")) == {
        "messages": [{"role": "user", "content": SECRET}]
    }


def test_whatever_is_asked_is_told_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    long = "x" * (2 * PROMPT_CHARS_MAX)
    log_prompts(
        [
            request("raw"),
            factories.embed([long], "embed"),
            Rank(incarnation=GATEWAY, id="rank", texts=pack(["b"]), count=1, query="a"),
        ]
    )
    raw, embed, rank = (record.getMessage() for record in caplog.records)
    assert raw == 'raw asks: {"prompt": "x"}'
    assert len(embed) == len("embed asks: ") + PROMPT_CHARS_MAX
    assert rank == 'rank asks: {"query": "a", "texts": ["b"]}'
