"""Comparison of prompts, and the bounded store of their records."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from broker.dispatch.flight import Flight
from broker.dispatch.prefix_hashes import HEAD_HASHES_MAX, TAIL_HASHES_MAX
from broker.dispatch.prompt_records import PromptRecord, PromptRecords, compare, record_of
from protocol.conversation import pack
from protocol.messages import Generate
from tests.factories import request

SYSTEM = {"role": "system", "content": "Be terse."}
HELLO = {"role": "user", "content": "hello"}
HI = {"role": "assistant", "content": "hi"}


def record(*messages: dict[str, Any], model: str = "m", tokens: int = 100, **fields: Any) -> PromptRecord:
    made = record_of(model, request(messages=messages, **fields))
    made.counted_tokens = tokens
    return made


@pytest.mark.parametrize(
    ("later", "change"),
    [
        (record(SYSTEM, HELLO, HI, HELLO), None),
        (record(SYSTEM, HELLO, model="n"), "model"),
        (record(SYSTEM, HELLO, cache_salt="s"), "salt"),
        (record(SYSTEM, HELLO, tools=pack([{}])), "tools"),
        (record({**SYSTEM, "content": "Be long."}, HELLO), "system"),
        (record(HELLO), "system"),
        (record(SYSTEM, HI), "messages"),
        (record(SYSTEM, HELLO, template_kwargs=pack({"reasoning_effort": "low"})), "options"),
        (record({**SYSTEM, "content": "Be long."}, HELLO, tools=pack([{}])), "tools"),
    ],
)
def test_the_first_difference_is_named(later: PromptRecord, change: str | None) -> None:
    found = compare(record(SYSTEM, HELLO), later)
    assert found.change == change
    assert found.kept_tokens + found.lost_tokens == 100
    assert (found.kept_tokens > 0) == (change in ("messages", None))
    assert (found.lost_tokens == 0) == (change is None)


def test_a_long_conversation_is_compared_although_its_record_is_bounded() -> None:
    turns = [{"role": "user", "content": f"turn {n}"} for n in range(2 * (HEAD_HASHES_MAX + TAIL_HASHES_MAX))]
    records = PromptRecords()
    earlier = kept(records, "a", request(messages=turns[:200]))
    assert len(earlier.marks) == HEAD_HASHES_MAX + TAIL_HASHES_MAX < len(turns)
    assert compare(earlier, record(*turns)).change is None
    assert compare(earlier, record(*turns[:199], HELLO)).change == "messages"


def kept(records: PromptRecords, id: str, asked: Generate, owner: bytes = b"") -> PromptRecord:
    flight = Flight(asked, "m", opened_at=0.0, waiting_since=0.0)
    flight.prompt_tokens = 7
    with records.recording(owner, id, record_of("m", asked), contextlib.nullcontext([flight])):
        found = records.get(owner, id)
        assert found is not None
        assert found.prompt_tokens == 7
        flight.prompt_tokens = 8
    assert (found.prompt_tokens, found.flight) == (8, None)
    return found


def test_records_belong_to_their_owner_and_the_oldest_is_evicted() -> None:
    records = PromptRecords(count_max=2)
    for id in ("a", "b", "c"):
        kept(records, id, request(messages=[HELLO]), owner="ann")
    assert (len(records), records.get("ann", "a")) == (2, None)
    assert records.get("ann", "c") is not None
    assert records.get("bob", "c") is None
    assert record_of("m", request(prompt="text")).system == b""
