"""Prompts that cannot fit are refused by their bytes, before a worker gets them; no other is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from broker.dispatch.admission import check_prompt
from protocol.errors import Code, RequestError
from protocol.messages import Ready
from protocol.types import TokenizeOptions
from tests.broker.dispatcher_line import Line, ready, refusal
from tests.factories import embed, request

CONTEXT, TOKEN_BYTES = 100, 10
READY = Ready(incarnation="w", model="m", context_length=CONTEXT, running_max=1, token_bytes_max=TOKEN_BYTES)
LONG = "x" * (CONTEXT + 1) * TOKEN_BYTES


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"prompt": LONG}, "prompt"),
        ({"prompt": LONG, "source": "prompt[1]"}, "prompt[1]"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}, user(LONG)]}, "messages"),
        ({"messages": [user([{"type": "image"}, {"type": "text", "text": LONG}])]}, "messages"),
        ({"messages": [user([{"type": "text", "text": LONG[: len(LONG) // 2 + 1]}] * 2)]}, "messages"),
    ],
)
def test_prompt_that_cannot_fit_is_refused(fields: dict[str, Any], source: str) -> None:
    error = refusal(check_prompt, request(**fields), READY)
    assert (error.code, error.kind.status, error.param) == (Code.CONTEXT_LENGTH_EXCEEDED, 400, source)
    assert f"resulted in more than {CONTEXT + 1} tokens" in error.message
    assert error.details == {"prompt_tokens": CONTEXT + 2, "context_length": CONTEXT}


def test_prompt_that_may_fit_or_whose_bound_is_unknown_is_left_to_the_worker() -> None:
    may_fit: list[dict[str, Any]] = [
        {"prompt": LONG[TOKEN_BYTES:]},
        {"prompt": " \n\u3000" * 10_000},  # a template or an added token may strip it
        {"prompt": LONG, "tokenizing": TokenizeOptions()},
        {"tokens": [1] * 10_000},
        {"messages": [user(LONG), user("a")]},  # a template may show the last message only
        {"messages": [user("a"), {"role": "assistant", "content": LONG}]},
        {"messages": [user("a")], "tools": [{"description": LONG}]},
        {"messages": [user([{"type": "text", "text": None}, LONG])]},
        {"messages": []},
        {"messages": Raw(b"\xc1" + LONG.encode())},
    ]
    for fields in may_fit:
        check_prompt(request(**fields), READY)
    check_prompt(request(prompt=LONG), replace(READY, token_bytes_max=0))
    check_prompt(request(prompt=LONG), replace(READY, context_length=0))
    check_prompt(embed([LONG]), READY)


@given(st.text(max_size=3 * CONTEXT * TOKEN_BYTES))
def test_prompt_is_refused_only_if_its_solid_bytes_exceed_the_context(text: str) -> None:
    solid = len("".join(text.split()).encode(errors="replace"))
    try:
        check_prompt(request(prompt=text), READY)
    except RequestError:
        assert solid > CONTEXT * TOKEN_BYTES
    else:
        assert solid < (CONTEXT + 1) * TOKEN_BYTES


def test_refused_prompt_is_never_sent() -> None:
    line = Line()
    line.hello("w", "m")
    line.say("w", replace(ready("w"), token_bytes_max=1))
    long = line.dispatcher.submit(line.dispatcher.find("m"), [request(prompt="x" * 100_000)], ())
    assert "maximum context length" in refusal(long.__enter__).message
    assert line.attempts_sent_to("w") == []
    assert len(line.dispatcher.flights) == 0
