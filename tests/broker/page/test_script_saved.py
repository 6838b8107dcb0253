"""`saved.js` and `exports.js`: the stored form of a conversation, and its exports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.broker.page.scripts import Call

IMAGE = "data:image/png;base64," + "A" * 400


def question(number: int, text: str = "Why?", images: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"role": "user", "text": text, "images": list(images), "number": number}


def answer(number: int, text: str = "So.", **told: Any) -> dict[str, Any]:
    return {"role": "assistant", "text": text, "calls": [], "number": number, "endedAt": 2.0} | told


def state(*turns: dict[str, Any], **told: Any) -> dict[str, Any]:
    return {"turns": list(turns), "fields": {"seed": "1"}, "model": "m", "prompt": ""} | told


def test_a_conversation_is_restored_as_it_was(call: Call) -> None:
    given = state(question(1, images=(IMAGE,)), answer(2, usage={"completion_tokens": 3}), prompt="And")
    found = call("saved.js", "unpacked", call("saved.js", "packed", given))
    assert found["turns"][0] == given["turns"][0]
    assert found["turns"][1].items() >= given["turns"][1].items()
    assert found | {"turns": given["turns"]} == given


@pytest.mark.parametrize("limit", [100, 400, 2000])
def test_stored_text_never_exceeds_its_limit_and_begins_with_a_question(call: Call, limit: int) -> None:
    turns = [
        turn
        for number in range(1, 20, 2)
        for turn in (question(number, "x" * 40, (IMAGE,)), answer(number + 1, "y" * 40))
    ]
    text = call("saved.js", "packed", state(*turns), limit)
    assert len(text) <= limit
    kept = json.loads(text)["turns"] if text else []
    assert [turn["number"] for turn in kept] == list(range(21 - len(kept), 21))
    assert not kept or kept[0]["role"] == "user"
    if limit == 2000:
        assert 0 < len(kept) < 20
        assert all(turn["lost"] == 1 and turn["images"] == [] for turn in kept[::2])


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "{}"),
        json.dumps(state({"role": "critic", "text": "a"})),
        json.dumps(state(fields={"seed": 1})),
        json.dumps(state(model=None)),
    ],
)
def test_stored_text_that_is_invalid_is_ignored(call: Call, text: str) -> None:
    assert call("saved.js", "unpacked", text) is None


def test_a_conversation_as_markdown_has_a_heading_for_each_turn(call: Call) -> None:
    calls = [{"id": "c", "name": "note", "arguments": '{"a": "```"}'}]
    tool = {"role": "tool", "call": "c", "name": "note", "text": "done", "number": 3}
    told = call(
        "exports.js", "markdown", [question(1, images=(IMAGE,)), answer(2, calls=calls), tool], "Be brief."
    )
    assert told == (
        "## System\n\nBe brief.\n\n## User\n\n*Image 1*\n\nWhy?\n\n## Assistant\n\nSo.\n\n"
        '````json\nnote({"a": "```"})\n````\n\n## Tool: note\n\ndone\n'
    )
