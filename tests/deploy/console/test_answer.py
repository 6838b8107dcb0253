"""Streamed answers: complete blocks of Markdown, and the summary below."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.console.answer import Answer, settled
from deploy.console.http import AnswerDelta


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("```\n~~~\n\n```\n\nc", "```\n~~~\n\n```\n\n"),
        ("1. a\n\n   more\n\n2. b", ""),
        ("1. a\n\nnot in the list", "1. a\n\n"),
    ],
)
def test_it_is_settled_between_two_blocks(text: str, printed: str) -> None:
    assert text[: settled(text)] == printed


pieces = st.lists(st.sampled_from(["a", " ", "\n", "\n\n", "```\n", "~~~", "- ", "1. ", "b c"]), max_size=30)


@given(pieces)
def test_settled_markdown_prefix_never_shrinks(parts: list[str]) -> None:
    text, before = "", 0
    for part in parts:
        text += part
        now = settled(text)
        assert before <= now <= len(text)
        assert now == 0 or text[:now].endswith("\n")
        before = now


def test_summary_has_tokens_decode_speed_and_time_to_first_token() -> None:
    answer = Answer(began=10.0)
    for at, piece in (
        (10.5, AnswerDelta("thought", "hm")),
        (11.0, AnswerDelta("text", "a")),
        (12.5, AnswerDelta("end", "stop")),
        (99.0, AnswerDelta("usage", tokens=41)),
    ):
        answer.add(piece, at)
    assert answer.summary(99.0) == "41 tokens, 20.0 tokens/s, first token after 0.50 s"


@pytest.mark.parametrize(
    ("answer", "summary"),
    [
        (Answer(reason="length"), "cut off at the maximum number of tokens"),
        (Answer(stopped=True, first_at=1.0, last_at=2.0), "stopped after 3.0 s"),
    ],
    ids=["cut off", "stopped"],
)
def test_summary_has_only_what_is_known(answer: Answer, summary: str) -> None:
    assert answer.summary(3.0) == summary
