"""Tools of the responses API: which are offered, and how they may be called."""

from __future__ import annotations

from typing import Any

import pytest

from broker.dialects.responses.tools import ResponsesToolOffer, flat_name, offer, told
from protocol.errors import RequestError
from protocol.types import ToolCallConstraint as Calling

READ: dict[str, Any] = {"type": "function", "name": "read", "parameters": {"type": "object"}}
NOTE: dict[str, Any] = {"type": "function", "name": "note", "strict": True}
FILES: dict[str, Any] = {
    "type": "namespace", "name": "mcp__files__", "description": "Files.",
    "tools": [READ, {"type": "mcp", "name": "raw"}],
}  # fmt: skip
ELSEWHERE = [{"type": "web_search"}, {"type": "local_shell"}, {"type": None}]


def names(offered: ResponsesToolOffer) -> list[str]:
    return [tool["function"]["name"] for tool in offered.shown]


def choose(choice: Any, *tools: dict[str, Any], single: bool = False) -> ResponsesToolOffer:
    return offer(tools or (READ, NOTE, FILES), choice, single=single)


def test_functions_are_offered_those_of_a_namespace_by_both_names_in_one() -> None:
    offered = choose("auto", *ELSEWHERE, READ, FILES, {**READ, "description": "another of this name"})
    assert names(offered) == ["read", "mcp__files__read"]
    assert offered.shown[0]["function"] == {"name": "read", "parameters": {"type": "object"}}
    assert offered.calling is None
    assert offered.namespaces == {"mcp__files__read": ("mcp__files__", "read")}
    assert flat_name("mcp__files", "_read") == "mcp__files__read"
    assert flat_name(None, "_read") == "_read"


def test_custom_tool_is_offered_as_function_with_one_string_parameter() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'}
    patch = {"type": "custom", "name": "patch", "description": "Edits files.", "format": grammar}
    offered = choose(None, patch, READ, {**FILES, "tools": [{"type": "custom", "name": "raw"}]})
    assert names(offered) == ["patch", "read", "mcp__files__raw"]
    assert offered.customs == {"patch", "mcp__files__raw"}
    function = offered.shown[0]["function"]
    assert function["description"] == "Edits files."
    assert list(function["parameters"]["properties"]) == function["parameters"]["required"] == ["input"]
    assert 'start: "*** Begin"' in function["parameters"]["properties"]["input"]["description"]
    named = {"type": "custom", "name": "patch"}
    assert choose(named, patch, READ).calling == Calling(required=True, name="patch", single=True)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    assert names(choose(allowed, patch, READ)) == ["patch"]


@pytest.mark.parametrize(
    ("choice", "single", "calling"),
    [
        ("auto", True, Calling(single=True, strict=["note"])),
        (
            {"type": "function", "name": "read", "namespace": "mcp__files__"},
            False,
            Calling(required=True, name="mcp__files__read", single=True, strict=["note"]),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]},
            False,
            Calling(required=True),
        ),
    ],
)
def test_a_choice_says_how_tools_are_called(choice: Any, single: bool, calling: Calling) -> None:
    assert choose(choice, single=single).calling == calling


def test_none_offers_nothing_and_a_list_what_is_on_it() -> None:
    assert names(choose("none")) == []
    assert choose("none").calling is None
    listed = [{"type": "function", "name": "note"}, {"type": "web_search"}]
    assert names(choose({"type": "allowed_tools", "mode": "auto", "tools": listed})) == ["note"]


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ("sometimes", [READ], "tool_choice"),
        ({"type": "function", "name": "other"}, [READ], "tool_choice.name"),
        ({"type": "allowed_tools"}, [READ], "tool_choice.tools"),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]},
            [READ],
            "tool_choice.tools[0].name",
        ),
        ("required", [{"type": "web_search"}], "tool_choice"),
        (None, [READ, {"type": "function", "name": ""}], "tools[1].name"),
        (None, [{**FILES, "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
    ],
)
def test_invalid_tools_error_names_the_param(choice: Any, tools: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        choose(choice, *tools)
    assert caught.value.param == param


def test_a_function_is_repeated_with_all_that_clients_ask_for() -> None:
    assert told(READ) == {**READ, "description": None, "strict": None}
    assert told(FILES) == FILES
