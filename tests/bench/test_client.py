"""Measurements in an answer of the events that it was read from."""

from __future__ import annotations

from typing import Any

import pytest

from bench.client import Answer


def delta(**parts: Any) -> dict[str, Any]:
    return {"choices": [{"delta": parts}]}


def test_text_is_joined_whatever_it_is_called_and_never_twice() -> None:
    answer = Answer()
    answer.note(delta(role="assistant", content=""))
    answer.note(delta(reasoning="Hm", reasoning_content="Hm"))
    answer.note(delta(content=", yes", reasoning=None))
    answer.note(delta(tool_calls=[]))
    assert (answer.text, len(answer.pieces)) == ("Hm, yes", 2)
    assert answer.underway.is_set()


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 70}}, 70),
        ({}, None),  # a server that does not say has not cached nothing
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {}}, None),
    ],
)
def test_usage_says_what_was_cached(details: dict[str, Any], cached: int | None) -> None:
    answer = Answer()
    answer.note({"choices": [], "usage": {"prompt_tokens": 80, "completion_tokens": 8, **details}})
    assert (answer.prompt_tokens, answer.tokens, answer.cached_tokens) == (80, 8, cached)
