"""Request bodies of the responses API: fields and tools for the worker, echoed, and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.api.responses import body, request
from broker.api.responses.tools import PlacedTools, ResponsesToolOffer, flat_name, offer
from broker.dialects.body import encode
from protocol.errors import RequestError
from protocol.messages import Generate
from protocol.types import StructuredOutput
from protocol.types import ToolCallConstraint as Calling

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b"]}
READ: dict[str, Any] = {"type": "function", "name": "read", "parameters": {"type": "object"}}
NOTE: dict[str, Any] = {"type": "function", "name": "note", "strict": True}
FILES: dict[str, Any] = {
    "type": "namespace", "name": "mcp__files__", "description": "Files.",
    "tools": [READ, {"type": "mcp", "name": "raw"}],
}  # fmt: skip
ALL = ("read", "note", "mcp__files__read")
ELSEWHERE = [{"type": "web_search"}, {"type": "shell", "environment": {"type": "container_auto"}}]


def read(**fields: Any) -> body.Body:
    return body.read(json.dumps({"input": "hello", **fields}).encode())


def generate(**fields: Any) -> Generate:
    asked = read(**fields)
    messages = [{"role": "user", "content": "hello"}]
    return request.generate(asked, request.offered(asked, ()), messages, [], id="resp_1", incarnation="g")


def envelope(**fields: Any) -> Any:
    made = request.envelope(read(**fields), id="resp_1", model="m", created_at=7, kept=True)
    return json.loads(encode(made))


def named(name: str, **fields: str) -> dict[str, str]:
    return {"type": "function", "name": name, **fields}


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        generate(**fields)
    return caught.value


def test_parameters_are_passed_on() -> None:
    made = generate(
        max_output_tokens=9, temperature=0.5, top_p=0.9, seed=3, top_k=4, stop=["x"], priority=-1,
        cache_salt="s", top_logprobs=2,
    )  # fmt: skip
    assert (made.max_tokens, made.stop, made.priority, made.cache_salt) == (9, ["x"], -1, "s")
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.9, 3, 4)
    assert made.source == "input"
    bare, likely = generate(), generate(include=["message.output_text.logprobs"])
    assert (bare.max_tokens, bare.sampling.logprobs, likely.sampling.logprobs) == (None, None, 0)
    assert sampling.logprobs == 2


def test_a_format_is_the_form_of_the_answer() -> None:
    schema = {"type": "json_schema", "name": "t", "strict": True, "schema": SCHEMA}
    made = generate(text={"format": schema, "verbosity": "low"})
    assert made.form == StructuredOutput(
        kind="json_schema", text=json.dumps(SCHEMA), param="text.format.schema"
    )
    made = generate(text={"format": schema | {"strict": None}})
    assert made.form is not None
    assert not made.form.strict
    assert generate(text={"format": {"type": "json_object"}}).form == StructuredOutput(
        kind="json_object", param="text.format"
    )
    assert generate(text={"format": {"type": "text"}}).form is None


def test_a_response_repeats_what_was_asked_for_with_openais_defaults() -> None:
    shown = envelope()
    assert (shown["tools"], shown["tool_choice"], shown["parallel_tool_calls"]) == ([], "auto", True)
    assert (shown["temperature"], shown["top_p"], shown["metadata"]) == (1, 1, {})
    assert shown["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (shown["store"], shown["created_at"], shown["truncation"]) == (True, 7, "disabled")
    assert shown["reasoning"] == {"effort": None, "summary": None}
    schema = {"type": "json_schema", "name": "t", "strict": True, "schema": SCHEMA}
    shown = envelope(
        instructions="i", temperature=0, metadata={"a": "b"},
        tools=[{"type": "function", "name": "f"}, {"type": "web_search", "x": 1}, FILES],
        tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False, max_output_tokens=20,
        max_tool_calls=2, text={"format": schema},
        reasoning={"effort": "high", "generate_summary": "concise"}, user="u", truncation="auto",
    )  # fmt: skip
    assert (shown["instructions"], shown["temperature"], shown["metadata"]) == ("i", 0, {"a": "b"})
    assert shown["tools"][0] == {
        "type": "function", "name": "f", "description": None, "parameters": None, "strict": None,
    }  # fmt: skip
    assert shown["tools"][1:] == [{"type": "web_search", "x": 1}, FILES]
    assert shown["tool_choice"] == {"type": "function", "name": "f"}
    assert (shown["max_output_tokens"], shown["max_tool_calls"], shown["user"]) == (20, 2, "u")
    assert shown["text"]["format"] == schema | {"description": None}
    assert shown["reasoning"] == {"effort": "high", "summary": "concise"}
    assert shown["truncation"] == "disabled"


@pytest.mark.parametrize(
    ("fields", "summarized", "sealed"),
    [
        ({"reasoning": {"summary": "none"}}, False, False),
        ({"reasoning": {"generate_summary": "detailed"}}, True, False),
        ({"include": ["reasoning.encrypted_content"]}, False, True),
    ],
)
def test_thoughts_are_told_as_they_were_asked_for(fields: Any, summarized: bool, sealed: bool) -> None:
    asked = read(**fields)
    style = request.style(asked, request.offered(asked, ()))
    assert (style.summarized, style.sealed) == (summarized, sealed)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ["x"]}, "input[0]"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"background": True, "store": False}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"include": "all"}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "t"}}}, "text.format.schema"),
        *(
            ({"tool_choice": choice, "tools": tools}, param)
            for choice, tools, param in (
                ("sometimes", [READ], "tool_choice"),
                ({"type": "web_search"}, [READ], "tool_choice"),
                (named("other"), [READ], "tool_choice.name"),
                ({"type": {}, "name": "other"}, [READ], "tool_choice.name"),
                ({"type": ["function"]}, [READ], "tool_choice"),
                ({"type": "allowed_tools"}, [READ], "tool_choice.tools"),
                ({"type": "allowed_tools", "tools": [named("x")]}, [READ], "tool_choice.tools[0].name"),
                ("required", [{"type": "web_search"}], "tool_choice"),
                (None, [READ, named("")], "tools[1].name"),
                (None, [{"type": "shell", "environment": {}}], "tools[0].environment.type"),
                (None, [{**FILES, "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
            )
        ),
    ],
)
def test_invalid_request_error_names_the_param(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.param, error.kind.status) == (param, 400)


def names(offered: ResponsesToolOffer) -> list[str]:
    return [tool["function"]["name"] for tool in offered.shown]


def choose(choice: Any, *tools: dict[str, Any], single: bool = False) -> ResponsesToolOffer:
    return offer([PlacedTools("", tools or (READ, NOTE, FILES))], choice, single=single)


def test_functions_are_offered_those_of_a_namespace_by_both_names_in_one() -> None:
    untyped, second = {**READ, "type": None}, {**READ, "description": "another of this name"}
    offered = choose("auto", *ELSEWHERE, untyped, FILES, second)
    assert names(offered) == ["read", "mcp__files__read"]
    assert offered.shown[0]["function"] == {"name": "read", "parameters": {"type": "object"}}
    assert offered.shown[1]["function"]["description"] == "Files."
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


def test_tools_of_items_are_offered_behind_those_of_the_body() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Finds."}
    loaded = {
        "type": "namespace", "name": "functions", "tools": [READ | {"description": "new"}, {"name": "b"}],
    }  # fmt: skip
    asked = read(tools=[READ, search, {"type": "tool_search"}, FILES])
    items = [{"type": kind, "tools": [loaded]} for kind in ("additional_tools", "tool_search_output")]
    offered = request.offered(asked, [("input[0]", item) for item in items])
    assert names(offered) == ["read", "tool_search", "mcp__files__read", "b"]
    call = {"type": "tool_search_call", "call_id": "c", "arguments": {}}
    late = request.offered(asked, [("input[0]", item) for item in (call, *items)])
    assert names(late) == names(offered)[:-1]
    assert [tool["function"]["name"] for tool in late.late] == ["b"]
    spoken = request.conversation(
        asked, [("input[0]", item) for item in (call, *items)], system_in_place=True
    ).messages
    assert all('{"name":"b"}' in message["content"] for message in spoken[1:])
    summary = {"type": "compaction", "encrypted_content": "s"}
    assert names(request.offered(asked, [("input[0]", each) for each in (call, *items, summary)]))[-1] == "b"
    assert offered.shown[0]["function"]["description"] == "new"
    assert (offered.builtins, offered.namespaces["b"]) == ({"tool_search"}, ("functions", "b"))
    for tool in ({"type": "namespace", "name": "functions"}, named("b", namespace="functions"), search):
        asked = read(tools=[search], tool_choice={"type": "allowed_tools", "tools": [tool]})
        assert set(names(request.offered(asked, [("input[0]", items[0])]))) < {"read", "b", "tool_search"}
    with pytest.raises(RequestError) as caught:
        request.offered(asked, [("input[3]", {"type": "additional_tools", "tools": [named("")]})])
    assert caught.value.param == "input[3].tools[0].name"


def test_builtin_tools_of_the_client_are_offered_under_their_names() -> None:
    skill = {"name": "pdf", "description": "Reads PDFs.", "path": "/s"}
    shell = {"type": "shell", "environment": {"type": "local", "skills": [skill]}}
    tools = [{"type": "local_shell"}, shell, {"type": "apply_patch"}, named("tool_search")]
    offered = choose({"type": "shell"}, *tools)
    assert names(offered) == ["local_shell", "shell", "apply_patch", "tool_search"]
    assert offered.builtins == {"local_shell", "shell", "apply_patch"}
    assert offered.calling == Calling(required=True, name="shell", single=True)
    assert offered.shown[1]["function"]["description"].endswith("Skill pdf in /s: Reads PDFs.")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "apply_patch"}]}
    assert names(choose(allowed, *tools)) == ["apply_patch"]


@pytest.mark.parametrize(
    ("choice", "single", "offered", "calling"),
    [
        ("auto", True, [*ALL], Calling(single=True, strict=["note"])),
        (named("read", namespace="mcp__files__"),
         False, [*ALL], Calling(required=True, name="mcp__files__read", single=True, strict=["note"])),
        ({"type": "allowed_tools", "mode": "required", "tools": [named("read"), {"type": "web_search"}]},
         False, ["read"], Calling(required=True)),
        ("none", False, [], None),
    ],
)  # fmt: skip
def test_a_choice_says_how_tools_are_called(choice: Any, single: bool, offered: Any, calling: Any) -> None:
    chosen = choose(choice, single=single)
    assert (names(chosen), chosen.calling) == (offered, calling)
