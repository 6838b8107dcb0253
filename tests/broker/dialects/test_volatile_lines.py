"""Volatile lines before a system prompt are dropped, wherever the dialect puts them, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dialects.normalize import normalize
from broker.dialects.volatile_lines import HEADS, without_head

# As Claude Code 2.1 sends it, to Anthropic and to other servers.
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.fe5; cc_entrypoint=sdk-cli; cch=a1b2c;"
LATER = "x-anthropic-billing-header: cc_version=2.1.330.c62; cc_entrypoint=sdk-cli; cch=00000;"
PROMPT = "You are an agent.\n\nx-anthropic-billing-header: is a name that I mention."

TEXTS = st.lists(
    st.sampled_from([*HEADS, BILLING, "\n", "\n\n", "You are", " ", "x-anthropic", "x-anthropic-billing: y"])
).map("".join)


def system(*contents: Any) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": content} for content in contents]
    return normalize([*messages, {"role": "user", "content": "Hi"}]).messages


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "told",
    [
        (f"{BILLING}\n{PROMPT}",),
        (f"{BILLING}\n{LATER}\n{PROMPT}",),
        (parts(BILLING, PROMPT),),
        (BILLING, PROMPT),
    ],
)
def test_the_prompt_is_that_of_a_request_without_the_line(told: tuple[Any, ...]) -> None:
    assert system(*told) == system(PROMPT)


def test_other_text_is_left_unchanged() -> None:
    assert without_head(f" {BILLING}\n{PROMPT}") == f" {BILLING}\n{PROMPT}"
    user = {"role": "user", "content": f"{BILLING}\nWhat is this?"}
    assert normalize([user]).messages == [user]
    assert system(BILLING) == system(parts(BILLING)) == system()
    assert system("") != system()


@given(TEXTS)
def test_stripped_text_is_a_suffix_without_volatile_head(text: str) -> None:
    left = without_head(text)
    assert text.endswith(left)
    assert not left.startswith(HEADS)
    assert without_head(left) == left
