"""`formats.js`, `markdown.js`, `saved.js`, `exports.js` and `inspection.js`: numbers and texts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.broker.page.scripts import Call


def test_numbers_are_written_as_people_read_them(call: Call) -> None:
    for name, value, text in (
        ("count", 1234567, "1,234,567"), ("percent", 0.875, "88%"), ("bytes", 1536, "1.5 KiB"),
        ("bytes", 2**50 * 3, "3072 TiB"), ("seconds", 0.0421, "42 ms"), ("seconds", 3700.0, "1 h 1 min"),
        ("seconds", None, "–"),
    ):  # fmt: skip
        assert call("formats.js", name, value) == text


TEXT = """# Steam

One *wagon*, **two** `wagons`,
three.

- coal
- **water**

1. stoke
2. steam

```python
print("#no heading")

- no list
```
After."""


def test_blocks_are_what_was_meant(call: Call) -> None:
    told = call("markdown.js", "blocks", TEXT)
    kinds = ["heading", "paragraph", "bullets", "numbers", "code", "paragraph"]
    assert [block["kind"] for block in told] == kinds
    spans = [(span["kind"], span["text"]) for span in told[1]["spans"]]
    assert spans == [
        ("text", "One "), ("em", "wagon"), ("text", ", "), ("strong", "two"), ("text", " "),
        ("code", "wagons"), ("text", ",\nthree."),
    ]  # fmt: skip
    assert told[2]["items"][1] == [{"kind": "strong", "text": "water"}]
    assert told[4]["language"] == "python"
    assert told[4]["text"] == 'print("#no heading")\n\n- no list'


def test_text_that_is_not_markup_is_preserved(call: Call) -> None:
    for text in ("2 * 3 * 4", "a*b*c", "**", "<b>x</b>"):
        plain = {"kind": "paragraph", "spans": [{"kind": "text", "text": text}]}
        assert call("markdown.js", "blocks", text) == [plain]


# --- saved conversations -----------------------------------------------------------------------------

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


def test_stored_text_that_is_invalid_is_ignored(call: Call) -> None:
    others = state({"role": "critic", "text": "a"}), state(fields={"seed": 1}), state(model=None)
    for text in ("", "{", "null", "{}", *map(json.dumps, others)):
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


# --- captured requests -------------------------------------------------------------------------------


def kept(**told: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1", "path": "/v1/chat/completions", "model": "org/model", "code": "stop",
        "prompt_tokens": 4, "answered": 2, "reuse": {"tokens": 3, "tier": "ram", "miss": "diverged_at_3"},
        "prompt": {"tokens": [1, 2, 3, 4]}, "answer": {"tokens": [5, 6]},
    } | told  # fmt: skip


def test_cached_prompt_tokens_are_separated_from_computed_ones(call: Call) -> None:
    assert call("inspection.js", "halves", kept()) == {"cached": [1, 2, 3], "computed": [4]}
    assert call("inspection.js", "halves", kept(reuse=None)) == {"cached": [], "computed": [1, 2, 3, 4]}


def test_why_no_more_came_from_the_cache_is_told(call: Call) -> None:
    assert call("inspection.js", "reuse", kept(reuse=None)) == "The prefix cache usage is unknown."
    words = "3 of 4 prompt tokens came from ram (75%). Miss reason: diverged at 3."
    assert call("inspection.js", "reuse", kept()) == words


def test_likelihoods_are_those_of_the_answer_alone(call: Call) -> None:
    asked = call("inspection.js", "scoring", kept())
    assert (asked["prompt"], asked["max_tokens"], asked["echo"]) == ([1, 2, 3, 4, 5, 6], 0, True)
    logprobs = {
        "tokens": ["<", "user", ">", "Hi", "Hel", ""],
        "token_logprobs": [None, -1, -1, -1, math.log(0.5), 0],
        "top_logprobs": [None, {}, {}, {}, {"Hel": math.log(0.5), "Yo": math.log(0.25)}, None],
    }
    told = call("inspection.js", "likelihoods", kept(), {"choices": [{"logprobs": logprobs}]})
    assert [(token["text"], round(token["share"], 6)) for token in told] == [("Hel", 0.5), ("▪", 1)]
    assert told[0]["label"] == '50%; most likely: "Hel" 50%, "Yo" 25%'


def test_a_body_is_laid_out_and_its_images_are_shortened(call: Call) -> None:
    body = {"image_url": {"url": "data:image/png;base64," + "A" * 500}, "text": "B" * 500}
    told = json.loads(call("inspection.js", "laidOut", json.dumps(body)))
    assert told["text"] == body["text"]
    assert told["image_url"]["url"].endswith("… (522 characters)")
    assert call("inspection.js", "laidOut", '{"cut') == '{"cut'
