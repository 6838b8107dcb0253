"""`formats.js` and `markdown.js`: formatting of numbers and answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broker.page.scripts import Call


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("count", 1234567, "1,234,567"),
        ("rate", 3.456, "3.5"),
        ("rate", 4.0, "4"),
        ("rate", 123.4, "123"),
        ("percent", 0.875, "88%"),
        ("bytes", 0, "0 B"),
        ("bytes", 1536, "1.5 KiB"),
        ("bytes", 2**50 * 3, "3072 TiB"),
        ("seconds", 0.0421, "42 ms"),
        ("seconds", 4.25, "4.3 s"),
        ("seconds", 59.0, "59 s"),
        ("seconds", 61.0, "1 min 1 s"),
        ("seconds", 3700.0, "1 h 1 min"),
        ("seconds", 86400 * 2.5, "2 days"),
        ("seconds", None, "–"),
        ("count", None, "–"),
    ],
)
def test_numbers_are_written_as_people_read_them(call: Call, name: str, value: Any, text: str) -> None:
    assert call("formats.js", name, value) == text


def test_words_follow_their_numbers(call: Call) -> None:
    assert call("formats.js", "plural", 1, "token") == "1 token"
    assert call("formats.js", "plural", 0, "token") == "0 tokens"
    assert call("formats.js", "plural", 2, "waits", "wait") == "2 wait"
    assert call("formats.js", "listed", "a", "", None, 0, "b") == "a · b"


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
    assert told[1]["spans"] == [
        {"kind": "text", "text": "One "},
        {"kind": "em", "text": "wagon"},
        {"kind": "text", "text": ", "},
        {"kind": "strong", "text": "two"},
        {"kind": "text", "text": " "},
        {"kind": "code", "text": "wagons"},
        {"kind": "text", "text": ",\nthree."},
    ]
    assert told[2]["items"][1] == [{"kind": "strong", "text": "water"}]
    assert told[4]["language"] == "python"
    assert told[4]["text"] == 'print("#no heading")\n\n- no list'


def test_code_that_is_still_being_written_is_code(call: Call) -> None:
    assert call("markdown.js", "blocks", "So:\n```\na = 1\n")[-1] == {
        "kind": "code",
        "language": "",
        "text": "a = 1\n",
    }


@pytest.mark.parametrize("text", ["2 * 3 * 4", "a*b*c", "**", "`", "<b>x</b>", "snake_case_name"])
def test_text_that_is_not_markup_is_preserved(call: Call, text: str) -> None:
    assert call("markdown.js", "blocks", text) == [
        {"kind": "paragraph", "spans": [{"kind": "text", "text": text}]}
    ]


def said(block: Any) -> str:
    spans = [span for item in block.get("items", [block.get("spans", [])]) for span in item]
    return str(block.get("text", "")) + "".join(span["text"] for span in spans)


@settings(max_examples=60)
@given(text=st.text("ab*`# -\n1.", max_size=60).filter(lambda text: "```" not in text))
def test_no_letter_is_lost(call: Call, text: str) -> None:
    told = "".join(said(block) for block in call("markdown.js", "blocks", text))
    assert [letter for letter in told if letter in "ab"] == [letter for letter in text if letter in "ab"]
