"""Reasoning in chat answers: under both field names, in streams and documents alike."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker.dialects import answer, chat
from broker.dispatch.flight import Item
from protocol.types import TokenLogprob, Usage
from tests import factories

HEAD = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1700000000, "model": "org/m"}


def items(growths: list[tuple[str, str]], **usage: int) -> list[Item]:
    """Return the items of an answer with one delta per pair of reasoning and text."""
    deltas = [
        factories.delta(text, sequence=n, tokens=[n], reasoning=thought)
        for n, (thought, text) in enumerate(growths)
    ]
    counted = Usage(prompt_tokens=5, completion_tokens=len(growths), **usage)
    return [factories.accepted(), *deltas, factories.finished(reason="length", usage=counted)]


def chunks(said: list[Item], *, logprobs: bool = False) -> list[dict[str, Any]]:
    stream = answer.ChoiceSseRenderer(
        HEAD.copy, chat.ChatChoiceRenderer(logprobs=logprobs), choices=1, include_usage=True
    )
    events = stream.feed([(0, said)]).decode().split("\n\n")[:-2]
    return [json.loads(event.removeprefix("data: ")) for event in events]


def whole(said: list[Item]) -> dict[str, Any]:
    renderer = answer.ChoiceDocumentRenderer(HEAD.copy, chat.ChatChoiceRenderer(logprobs=False), choices=1)
    document: dict[str, Any] = json.loads(renderer.feed([(0, said)]))
    return document


def joined(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(part["choices"][0]["delta"].get(name, "") for part in parts if part["choices"])


def test_thoughts_are_told_apart_from_content_under_both_names() -> None:
    said = items([("Hm, ", ""), ("yes.", ""), ("", "\n\nYes"), ("", "!")], reasoning_tokens=2)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(said) if chunk["choices"]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm, ", "reasoning": "Hm, "},
        {"reasoning_content": "yes.", "reasoning": "yes."},
        {"content": "\n\nYes"},
        {"content": "!"},
        {},
    ]
    assert whole(said)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "\n\nYes!",
        "refusal": None,
        "reasoning_content": "Hm, yes.",
        "reasoning": "Hm, yes.",
    }
    for usage in (chunks(said)[-1]["usage"], whole(said)["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=8))
def test_streamed_and_whole_say_the_same(growths: list[tuple[str, str]]) -> None:
    said = items(growths)
    message = whole(said)["choices"][0]["message"]
    for name in ("content", "reasoning_content", "reasoning"):
        assert joined(chunks(said), name) == message.get(name, "")


def test_an_answer_cut_within_its_thought_has_empty_content() -> None:
    choice = whole(items([("Hm", "")]))["choices"][0]
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


def test_reasoning_fields_are_absent_without_reasoning() -> None:
    said = items([("", "Yes")])
    assert "reasoning" not in json.dumps([chunks(said), whole(said)])


def test_a_thought_that_ends_with_a_reported_token_keeps_its_place() -> None:
    likelihood = TokenLogprob(bytes=b"a", logprob=-0.5)
    delta = factories.delta("a", reasoning="<", likelihoods=[likelihood])
    accepted, end = items([])
    choice = chunks([accepted, delta, end], logprobs=True)[1]["choices"][0]
    assert choice["delta"] == {"reasoning_content": "<", "reasoning": "<", "content": "a"}
    assert choice["logprobs"]["content"][0]["token"] == "a"
