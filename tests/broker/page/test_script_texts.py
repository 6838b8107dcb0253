"""`formats.js` and `markdown.js`: formatting of numbers and answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.page.scripts import Call


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("count", 1234567, "1,234,567"),
        ("percent", 0.875, "88%"),
        ("bytes", 1536, "1.5 KiB"),
        ("bytes", 2**50 * 3, "3072 TiB"),
        ("seconds", 0.0421, "42 ms"),
        ("seconds", 3700.0, "1 h 1 min"),
        ("seconds", None, "–"),
    ],
)
def test_numbers_are_written_as_people_read_them(call: Call, name: str, value: Any, text: str) -> None:
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


@pytest.mark.parametrize("text", ["2 * 3 * 4", "a*b*c", "**", "<b>x</b>"])
def test_text_that_is_not_markup_is_preserved(call: Call, text: str) -> None:
    assert call("markdown.js", "blocks", text) == [
        {"kind": "paragraph", "spans": [{"kind": "text", "text": text}]}
    ]
