"""Reasoning options: the same fields in every dialect, under the names of all servers that have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from broker.api.messages import body as messages
from broker.api.messages import request as anthropic
from broker.api.responses import body as responses
from broker.api.responses import request
from protocol.conversation import unpack
from protocol.errors import RequestError
from protocol.messages import Generate

SAID: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
MADE: dict[str, Any] = {"id": "r", "incarnation": "g"}
KWARGS, EFFORT, ON, OFF = "chat_template_kwargs", "reasoning_effort", "enabled", "disabled"
LOW, NONE = {EFFORT: "low"}, {EFFORT: "none", "enable_thinking": False}
YES, NO = {"enable_thinking": True}, {"enable_thinking": False}


def of_chat(fields: dict[str, Any]) -> Generate:
    raw = json.dumps({"messages": SAID, **fields}).encode()
    return chat.generate(chat_body.read(raw), SAID, [], **MADE)


def of_messages(fields: dict[str, Any]) -> Generate:
    raw = json.dumps({"messages": SAID, "max_tokens": 9, **fields}).encode()
    return anthropic.generate(messages.read(raw), SAID, [], thinks=True, **MADE)


def of_responses(fields: dict[str, Any]) -> Generate:
    body = responses.read(json.dumps({"input": "a", **fields}).encode())
    return request.generate(body, request.offered(body, []), SAID, [], **MADE)


DIALECTS = pytest.mark.parametrize("sent", [of_chat, of_messages, of_responses])


@DIALECTS
@pytest.mark.parametrize(
    ("fields", "options", "budget"),
    [
        ({EFFORT: "minimal"}, {EFFORT: "minimal"}, None),
        ({EFFORT: "none"}, NONE, None),
        ({EFFORT: "none", "enable_thinking": False}, NONE, None),
        ({"reasoning": {"effort": "low"}, EFFORT: "low"}, LOW, None),
        ({"reasoning": {"effort": "none", "exclude": False}}, NONE, None),
        ({"reasoning": {"enabled": False, "effort": "low"}}, LOW | NO, None),
        ({"reasoning": {"enabled": True, "max_tokens": 7}}, YES, 7),
        ({"thinking": {"type": ON, "budget_tokens": 7}}, YES, 7),
        ({"thinking": {"type": OFF, "budget_tokens": 7}}, NO, None),
        ({"thinking": {"type": "adaptive"}}, {}, None),
        ({"thinking": False, "think": False}, NO, None),
        ({"think": True}, YES, None),
        ({"think": "low"}, LOW | YES, None),
        ({"enable_thinking": True, KWARGS: {"a": None, "enable_thinking": None}}, YES | {"a": None}, None),
        ({KWARGS: {"thinking": False}}, NO | {"thinking": False}, None),
        ({KWARGS: {EFFORT: "none"}}, NONE, None),
        ({KWARGS: {"thinking_budget": 7}, "thinking_budget": 7}, {"thinking_budget": 7}, 7),
        ({"thinking_token_budget": 7.0, "include_reasoning": True, "reasoning_format": "parsed"}, {}, 7),
        ({"extra_body": {}, "reasoning": {"effort": None}}, {}, None),
    ],
)
def test_every_dialect_reads_every_name(
    sent: Any, fields: dict[str, Any], options: dict[str, Any], budget: int | None
) -> None:
    made = sent(fields)
    assert (unpack(made).options, made.thinking_budget) == (options, budget)


@DIALECTS
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({EFFORT: "none", "enable_thinking": True}, EFFORT),
        ({"enable_thinking": True, KWARGS: {"enable_thinking": False}}, "enable_thinking"),
        ({"think": False, "reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({EFFORT: "low", KWARGS: {EFFORT: "high"}}, EFFORT),
        ({"thinking_budget": 3, "thinking_token_budget": 5}, "thinking_token_budget"),
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens"),
        ({KWARGS: {"thinking_budget": True}}, f"{KWARGS}.thinking_budget"),
        ({EFFORT: "utmost"}, EFFORT),
        ({"think": "hard"}, "think"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"reasoning_format": "raw"}, "reasoning_format"),
        ({"extra_body": {"enable_thinking": False}}, "extra_body"),
    ],
)
def test_what_contradicts_or_is_not_served_is_refused_by_name(
    sent: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        sent(fields)
    assert refused.value.param == param
