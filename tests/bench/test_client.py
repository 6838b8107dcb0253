"""Measurements in an answer of the events that it was read from."""

from __future__ import annotations

from typing import Any

from bench.client import Answer


def delta(**parts: Any) -> dict[str, Any]:
    return {"choices": [{"delta": parts}]}


def test_text_is_joined_whatever_it_is_called_and_never_twice() -> None:
    answer = Answer()
    answer.note(delta(role="assistant", content=""))
    answer.note(delta(reasoning="Hm", reasoning_content="Hm"))
    answer.note(delta(content=", yes", reasoning=None))
    answer.note(delta(tool_calls=[]))
    assert answer.text == "Hm, yes"
    assert len(answer.pieces) == 2
    assert answer.underway.is_set()


def test_usage_says_what_was_cached() -> None:
    answer = Answer()
    details = {"prompt_tokens_details": {"cached_tokens": 70}}
    answer.note({"choices": [], "usage": {"prompt_tokens": 80, "completion_tokens": 8, **details}})
    assert (answer.prompt_tokens, answer.tokens, answer.cached_tokens) == (80, 8, 70)


def test_a_server_that_does_not_say_what_was_cached_is_not_taken_to_have_cached_nothing() -> None:
    silent: list[dict[str, Any]] = [{}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}]
    for details in silent:
        answer = Answer()
        answer.note({"choices": [], "usage": {"prompt_tokens": 80, "completion_tokens": 8, **details}})
        assert answer.cached_tokens is None
