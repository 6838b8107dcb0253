"""Which tools are offered, and how they may be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.dialects import chat, chat_body
from protocol.conversation import unpack
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.types import ToolCallConstraint as Calling

F, G = ({"type": "function", "function": {"name": name}} for name in "fg")
STRICT = {"type": "function", "function": {"name": "s", "strict": True, "parameters": {"type": "object"}}}
SEARCH = {"type": "web_search", "filters": {}}


def sent(**fields: Any) -> Generate:
    raw = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    read = chat_body.read(raw)
    messages = chat.conversation(read, system_in_place=False).messages
    return chat.generate(read, messages, [], id="a", incarnation="gateway")


def offered(message: Generate) -> list[str]:
    return [tool["function"]["name"] for tool in unpack(message).tools or []]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


@pytest.mark.parametrize(
    ("choice", "names", "calling"),
    [
        (None, "fg", Calling(single=True)),
        ("auto", "fg", Calling(single=True)),
        ("none", "", None),
        ({"name": "g"}, "fg", Calling(required=True, name="g", single=True)),
    ],
)
def test_functions_from_before_there_were_tools_are_offered_as_such(
    choice: Any, names: str, calling: Calling | None
) -> None:
    message = sent(functions=[F["function"], G["function"]], function_call=choice)
    assert ("".join(offered(message)), message.calling) == (names, calling)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}], "tools": [F]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        sent(**fields)
    assert refused.value.param == param


def test_calls_of_functions_in_the_past_are_calls() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":1}'}}
    result = {"role": "function", "name": "f", "content": "2"}
    message = sent(messages=[{"role": "user", "content": "hello"}, called, result])
    [_, answer, told] = unpack(message).messages or []
    assert answer["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert (told["role"], told["name"], told["content"]) == ("tool", "f", "2")


CALLED: list[tuple[dict[str, Any], str, Calling | None]] = [
    ({}, "", None),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, "", None),
    ({"tools": [F, G]}, "fg", None),
    ({"tools": [F, G, STRICT], "tool_choice": "none", "parallel_tool_calls": False}, "", None),
    ({"tools": [F, G], "parallel_tool_calls": False}, "fg", Calling(single=True)),
    ({"tools": [F, STRICT]}, "fs", Calling(strict=["s"])),
    ({"tools": [F, G], "tool_choice": "required"}, "fg", Calling(required=True)),
    (
        {"tools": [F, STRICT], "tool_choice": "required", "parallel_tool_calls": False},
        "fs",
        Calling(required=True, single=True, strict=["s"]),
    ),
    ({"tools": [F, G], "tool_choice": named("g")}, "fg", Calling(required=True, name="g", single=True)),
    (
        {"tools": [F, G], "tool_choice": {"type": "function", "name": "g"}},
        "fg",
        Calling(required=True, name="g", single=True),
    ),
    ({"tools": [F, G, STRICT], "tool_choice": allowed("auto", named("g"))}, "g", None),
    (
        {"tools": [F, G, STRICT], "tool_choice": allowed("auto", named("s"), {"name": "f"})},
        "fs",
        Calling(strict=["s"]),
    ),
    ({"tools": [F, G], "tool_choice": allowed("required", named("f"))}, "f", Calling(required=True)),
    (
        {"tools": [F, SEARCH], "tool_choice": allowed("required", named("f"), {"type": "mcp", "x": 1})},
        "f",
        Calling(required=True),
    ),
    ({"tools": [SEARCH, F]}, "f", None),
    ({"tools": [{"function": {"name": "f"}}, {"type": None, "function": {"name": "g"}}]}, "fg", None),
]


@pytest.mark.parametrize(("fields", "names", "calling"), CALLED)
def test_tool_choice_determines_offered_tools_and_call_constraint(
    fields: dict[str, Any], names: str, calling: Calling | None
) -> None:
    message = sent(**fields)
    assert (offered(message), message.calling) == ([*names], calling)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [F], "tool_choice": allowed("required")}, "tool_choice"),
    ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [F], "tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": named("f")}, "tool_choice.function.name"),
    ({"tools": [F], "tool_choice": named("nope")}, "tool_choice.function.name"),
    ({"tools": [F], "tool_choice": {"type": "function", "name": "nope"}}, "tool_choice.name"),
    ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [F], "tool_choice": {"type": "function", "function": "f"}}, "tool_choice.function"),
    ({"tools": [SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
        "tool_choice.allowed_tools.mode",
    ),
    ({"tools": [F], "tool_choice": allowed("sometimes")}, "tool_choice.allowed_tools.mode"),
    (
        {"tools": [F], "tool_choice": allowed("auto", named("f"), named("nope"))},
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{p}-{n}" for n, (_, p) in enumerate(WRONG)])
def test_a_choice_that_cannot_be_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        sent(**fields)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, param)
    assert f"'{param}'" in caught.value.message
