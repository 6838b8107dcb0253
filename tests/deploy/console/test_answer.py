"""Complete blocks of streamed Markdown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.console.answer import settled


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("one paragraph", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n", ""),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("```\n~~~\n\n```\n\nc", "```\n~~~\n\n```\n\n"),
        ("- a\n\n- b", ""),
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
