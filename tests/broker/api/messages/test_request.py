"""Anthropic's request bodies become the same `Generate` as the equivalent chat request."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from broker.api.messages import body, request
from broker.api.messages.content import PassedOver
from broker.api.messages.conversation import conversation
from broker.dialects.foreign import SUMMARY
from broker.dialects.parts import Image
from protocol.conversation import IN_MESSAGE, PROMPT_ENDS
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.types import StructuredOutput, ToolCallConstraint

HI = {"role": "user", "content": "Hi"}
PIXEL = "iVBORw0KGgo="
LOOK = {
    "name": "look",
    "description": "Look around.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}


def raw(messages: Any = (HI,), **fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 16, "messages": list(messages), **fields}).encode()


def generated(messages: Any = (HI,), *, thinks: bool = True, **fields: Any) -> Generate:
    read = body.read(raw(messages, **fields))
    spoken = conversation(read, system_in_place=True)
    return request.generate(read, spoken.messages, [], id="x", incarnation="g", thinks=thinks)


def canonical(messages: Any, system_in_place: bool = True, **fields: Any) -> list[dict[str, Any]]:
    return conversation(body.read(raw(messages, **fields)), system_in_place=system_in_place).messages


def unpacked(packed: Any) -> Any:
    return None if packed is UNSET else msgspec.msgpack.decode(packed)


def refused(messages: Any = (HI,), **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        generated(**{"messages": messages} | fields)
    assert caught.value.kind.status == 400
    return caught.value


def said(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def block(type: str, **fields: Any) -> dict[str, Any]:
    return {"type": type, **fields}


def text(text: str, **fields: Any) -> dict[str, Any]:
    return block("text", text=text, **fields)


CACHED = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"at": "駅"}'}}


def test_a_conversation_with_tools_is_the_same_for_a_worker_as_in_chat() -> None:
    ours = raw(
        [
            {"role": "user", "content": [text("Where is it?", **CACHED)]},
            {
                "role": "assistant",
                "content": [
                    block("thinking", thinking="I had better look.", signature="rh1_0"),
                    block("redacted_thinking", data="0000"), text("Let me "), text("see."),
                    block("tool_use", id="call_0", name="look", input={"at": "駅"}, **CACHED),
                ],
            },
            {
                "role": "user",
                "content": [
                    text("And hurry."),
                    block("tool_result", tool_use_id="call_0", content=[text("It"), text("is there.")]),
                ],
            },
            {"role": "system", "content": [text("Be brief.")]}, {"role": "user", "content": "So?"},
        ],
        system=[text("You are a guide.", **CACHED), text("Be kind.")],
        tools=[LOOK | CACHED, {"type": "web_search_20250305", "name": "web_search"}],
        output_config={"effort": "low"},
    )  # fmt: skip
    function = {"name": "look", "description": "Look around.", "parameters": LOOK["input_schema"]}
    theirs = {
        "model": "m",
        "messages": [
            {"role": "system", "content": [text("You are a guide."), text("Be kind.")]},
            {"role": "user", "content": "Where is it?"},
            {
                "role": "assistant", "content": "Let me see.", "reasoning_content": "I had better look.",
                "tool_calls": [CALL],
            },
            {"role": "tool", "tool_call_id": "call_0", "content": "It\nis there."},
            {"role": "user", "content": "And hurry."}, {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "So?"},
        ],
        "tools": [{"type": "function", "function": function}], "reasoning_effort": "low",
    }  # fmt: skip
    read, chatted = body.read(ours), chat_body.read(json.dumps(theirs).encode())
    for in_place in (True, False):
        spoken = conversation(read, system_in_place=in_place)
        said = chat.conversation(chatted, system_in_place=in_place)
        assert spoken == said
        sent = request.generate(read, spoken.messages, [], id="x", incarnation="g", thinks=True)
        expected = chat.generate(chatted, said.messages, [], id="x", incarnation="g")
        for field in ("messages", "tools", "template_kwargs"):
            assert getattr(sent, field) == getattr(expected, field)


def test_results_come_before_what_the_user_says_beside_them() -> None:
    content = [
        text("First"), block("tool_result", tool_use_id="a", content="1"),
        block("tool_result", tool_use_id="b", is_error=True),
        block("tool_result", tool_use_id="c", content="no such file", is_error=True), text("last"),
    ]  # fmt: skip
    assert canonical([{"role": "user", "content": content}]) == [
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "Error", "tool_call_id": "b"},
        {"role": "tool", "content": "no such file", "tool_call_id": "c"},
        {"role": "user", "content": "First\nlast"},
    ]


def test_images_are_found_wherever_they_are_and_named_as_the_client_knows_them() -> None:
    data = block("image", source={"type": "base64", "media_type": "image/png", "data": PIXEL})
    link = block("image", source={"type": "url", "url": "https://example.org/a.png"})
    content = [text("See"), block("tool_result", tool_use_id="a", content=[text("Here"), link]), data]
    spoken = conversation(body.read(raw([HI, {"role": "user", "content": content}])), system_in_place=True)
    assert spoken.attachments == (
        Image("https://example.org/a.png", "messages[1].content[1].content[1]"),
        Image(f"data:image/png;base64,{PIXEL}", "messages[1].content[2]"),
    )
    place = {"type": "image"}
    contents = [message["content"] for message in spoken.messages]
    assert contents == ["Hi", [text("Here"), place], [text("See"), place]]


def test_documents_are_read_as_far_as_they_are_text() -> None:
    plain = block("document", title="T", source={"type": "text", "media_type": "text/plain", "data": "D"})
    parts = block("document", source={"type": "content", "content": [text("P"), text("Q")]})
    found = block("search_result", title="S", source="https://a", content=[text("F")])
    message = {"role": "user", "content": [plain, parts, found]}
    assert canonical([message])[0]["content"] == "T\nD\nP\nQ\nS\nhttps://a\nF"
    pdf = block("document", source={"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="})
    error = refused([{"role": "user", "content": [text("See"), pdf]}])
    assert (error.code, error.param) == (Code.UNSUPPORTED_MEDIA, "messages[0].content[1].source")
    assert "send its text" in error.message


HIDDEN = [{"type": "web_search_result", "encrypted_content": "x"}]
FETCHED = {"type": "web_fetch_result", "content": {"source": {"type": "text", "data": "Page."}}}
RAN = {"type": "code_execution_result", "stdout": "3", "stderr": "", "return_code": 0, "content": []}
REFERENCES = {"type": "tool_search_tool_search_result", "tool_references": [{"tool_name": "look"}]}


def test_content_that_is_missing_or_that_nobody_can_read_is_empty() -> None:
    unread = [block(kind.__struct_config__.tag) for kind in PassedOver.__subclasses__()]
    unread += [
        block("server_tool_use", id="s", name="web_search", input={"query": "q"}),
        block("web_search_tool_result", tool_use_id="s", content=HIDDEN),
        block("compaction", content=None),
    ]
    for content in ({}, {"content": None}, {"content": ""}, {"content": []}, {"content": unread}):
        said = canonical([HI, {"role": "assistant", **content}, HI])[1]
        assert said == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("kind", "content", "shown"),
    [
        ("mcp_tool_result", [text("a"), text("b")], "a\nb"),
        ("mcp_tool_result", "a", "a"),
        ("web_search_tool_result", [HIDDEN[0] | {"url": "u", "title": "t"}], '{"url":"u","title":"t"}'),
        ("web_fetch_tool_result", FETCHED, "Page."),
        ("code_execution_tool_result", RAN, '{"stdout":"3","return_code":0}'),
        ("tool_search_tool_result", REFERENCES, "look"),
        ("advisor_tool_result", {"type": "advisor_result", "text": "No."}, "No."),
    ],
)
def test_results_of_tools_that_ran_elsewhere_are_results(kind: str, content: Any, shown: str) -> None:
    call = block("server_tool_use", id="s", name="f", input={"q": 1})
    answer = [text("Wait. "), call, block(kind, tool_use_id="s", content=content), text("So.")]
    [_, said, result, end] = canonical([HI, {"role": "assistant", "content": answer}])
    assert (said["content"], said["tool_calls"][0]["function"]["arguments"]) == ("Wait. ", {"q": 1})
    assert result == {"role": "tool", "tool_call_id": "s", "content": shown}
    assert end == {"role": "assistant", "content": "So."}


def test_a_compaction_stands_for_all_before_it() -> None:
    answer = [text("old"), block("compaction", content="They met."), text("new")]
    kept = canonical([HI, {"role": "assistant", "content": answer}, HI], system="S")
    assert [message["content"] for message in kept] == ["S", f"{SUMMARY}\n\nThey met.", "new", "Hi"]


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("La, ", IN_MESSAGE),
        ([text("La, ")], IN_MESSAGE),
        ([text("a"), block("tool_use", id="c", name="f", input={})], None),
    ],
)
def test_a_last_message_of_the_assistants_begins_the_answer(content: Any, end: str | None) -> None:
    begun = {"role": "assistant", "content": content}
    assert (unpacked(generated([HI, begun]).template_kwargs) or {}).get(PROMPT_ENDS) == end
    assert PROMPT_ENDS not in (unpacked(generated([HI, begun, HI]).template_kwargs) or {})


def test_a_body_with_everything_is_a_request_with_everything() -> None:
    sent = generated(
        temperature=0.5, top_p=0.9, top_k=40, seed=7, stop_sequences=["\n\nHuman:", "END"], priority=-1,
        cache_salt="tenant", cache_pin=True, thinking={"type": "enabled", "budget_tokens": 2048},
        metadata={"user_id": "u"}, service_tier="auto", context_management={"edits": []}, mcp_servers=[],
        container=None, anything={"else": 1},
    )  # fmt: skip
    drawn = sent.sampling
    assert (drawn.seed, drawn.temperature, drawn.top_p, drawn.top_k) == (7, 0.5, 0.9, 40)
    assert (sent.stop, sent.max_tokens, sent.priority) == (["\n\nHuman:", "END"], 16, -1)
    assert (sent.cache_salt, sent.cache_pin, sent.thinking_budget) == ("tenant", True, 2048)
    assert unpacked(sent.template_kwargs) == {"enable_thinking": True}
    assert (sent.form, sent.calling, sent.tokenizing) == (None, None, None)
    fields = body.Body.__struct_fields__
    nulls = generated(**dict.fromkeys(fields) | {"messages": [HI], "max_tokens": 16, "seed": 3})
    assert nulls == generated(seed=3)


def test_a_wish_to_think_is_told_to_the_template() -> None:
    for thinking, wishes, budget in (
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}, 1024),
        ({"type": "disabled"}, {"enable_thinking": False}, None),
        ({"type": "between_tools"}, None, None),
    ):
        sent = generated(thinking=thinking)
        assert (unpacked(sent.template_kwargs), sent.thinking_budget) == (wishes, budget)
        assert generated(thinking=thinking, thinks=False).thinking_budget is None


def test_which_tools_are_offered_and_how_they_are_called() -> None:
    for choice, calling in (
        ({"type": "auto"}, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolCallConstraint(single=True)),
        ({"type": "any"}, ToolCallConstraint(required=True)),
        ({"type": "tool", "name": "look"}, ToolCallConstraint(required=True, name="look", single=True)),
    ):
        sent = generated(tools=[LOOK], tool_choice=choice)
        assert (sent.calling, len(unpacked(sent.tools))) == (calling, 1)
    strict = LOOK | {"strict": True, "type": "custom"}
    assert generated(tools=[strict]).calling == ToolCallConstraint(strict=["look"])
    none = generated(tools=[LOOK], tool_choice={"type": "none"})
    assert (none.tools, none.calling) == (UNSET, None)
    own = [{"type": "web_search_20250305", "name": "web_search"}]
    assert generated(tools=own).tools is UNSET
    shown = unpacked(generated(tools=[*own, {"name": "bare"}]).tools)
    assert shown == [{"type": "function", "function": {"name": "bare"}}]


FILES = "path view_range file_text old_str new_str insert_line"
CLICKS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click screenshot "
    "cursor_position"
)
LATER_CLICKS = f"{CLICKS} left_mouse_down left_mouse_up triple_click scroll hold_key wait"
AT = "coordinate text"
LATER_AT = f"{AT} start_coordinate scroll_direction scroll_amount duration"
MEMORY = {"type": "memory_20250818", "strict": True}
SCREEN = {"display_width_px": 1024, "display_height_px": 768}
ZOOM = SCREEN | {"type": "computer_20251124", "enable_zoom": True}


@pytest.mark.parametrize(
    ("tool", "choices", "fields"),
    [
        ({"type": "bash_20241022"}, "", "restart"),
        ({"type": "bash_20991231"}, "", "restart"),
        ({"type": "text_editor_20250124"}, "view create str_replace insert undo_edit", FILES),
        ({"type": "text_editor_20250728"}, "view create str_replace insert", f"{FILES} insert_text"),
        (MEMORY, "view create str_replace insert delete rename", f"{FILES} insert_text old_path new_path"),
        (SCREEN | {"type": "computer_20241022"}, CLICKS, AT),
        (SCREEN | {"type": "computer_20250124"}, LATER_CLICKS, LATER_AT),
        (ZOOM, f"{LATER_CLICKS} zoom", f"{LATER_AT} region"),
    ],
)
def test_tools_with_anthropics_schema_are_offered_with_it(tool: Any, choices: str, fields: str) -> None:
    sent = generated(tools=[{"name": "own"} | tool], tool_choice={"type": "tool", "name": "own"})
    [function] = [shown["function"] for shown in unpacked(sent.tools)]
    (_, chosen), *others = function["parameters"]["properties"].items()
    assert (function["name"], " ".join(chosen.get("enum", ()))) == ("own", choices)
    assert " ".join(name for name, _ in others) == fields
    assert ("1024 x 768" in function["description"]) == ("display_width_px" in tool)
    assert sent.calling.strict == (["own"] if "strict" in tool else [])


LATER = LOOK | {"name": "later", "defer_loading": True}
SPY = {"name": "spy", "input_schema": {}}


def change(kind: str, **tool: Any) -> dict[str, Any]:
    return block(f"tool_{kind}", tool=tool)


ADD = change("addition", type="tool_reference", name="look")
CUT = change("removal", type="tool_reference", name="look")
DEFINE = change("addition", type="tool_definition", definition=SPY)
MCP = [change("removal", type="mcp_toolset_reference", server_name="m")]
MCP += [change("addition", type="mcp_tool_reference", server_name="m", name="look")]
NAMELESS = change("addition", type="tool_definition", definition={})
SEARCH = change("addition", type="tool_definition", definition={"type": "web_search_20250305"})


@pytest.mark.parametrize(
    ("changes", "names", "late"),
    [
        ([], ["look"], ["later"]),
        ([ADD, *MCP, SEARCH], ["look"], ["later"]),
        ([CUT], ["later"], []),
        ([CUT, ADD], ["look"], ["later"]),
        ([DEFINE], ["look"], ["later", "spy"]),
        ([DEFINE, change("removal", type="tool_reference", name="spy")], ["look"], ["later"]),
        (
            [change("addition", type="tool_definition", definition=SPY | {"name": "look"})],
            ["look"],
            ["later"],
        ),
        ([block("compaction", content="s", tool_changes=[CUT, DEFINE])], ["spy"], ["later"]),
    ],
)
def test_tools_change_within_a_conversation_behind_its_beginning(
    changes: Any, names: list[str], late: list[str]
) -> None:
    spoken = [HI, {"role": "system", "content": [text("Tools changed."), *changes]}]
    if changes and changes[0]["type"] == "compaction":
        spoken[1] = {"role": "assistant", "content": changes}
    sent = generated([*spoken, HI], tools=[LOOK, LATER])
    assert [tool["function"]["name"] for tool in unpacked(sent.tools)] == names
    found = [] if sent.late_tools is UNSET else unpacked(sent.late_tools)
    assert [tool["function"]["name"] for tool in found] == late


def test_a_late_tool_is_defined_by_the_message_that_loads_it() -> None:
    call = {"role": "assistant", "content": [block("tool_use", id="a", name="look", input={})]}
    reference = block("tool_reference", tool_name="later")
    result = {"role": "user", "content": [block("tool_result", tool_use_id="a", content=[reference])]}
    added = {"role": "system", "content": [DEFINE]}
    sent = generated([HI, call, result, added], tools=[LOOK, LATER])
    *_, found, more = [message["content"] for message in unpacked(sent.messages)]
    late = [json.dumps(tool["function"], separators=(",", ":")) for tool in unpacked(sent.late_tools)]
    assert [found, more] == late
    searched = [LOOK, LATER, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}]
    sent = generated([HI, call, result], tools=searched)
    assert [tool["function"]["name"] for tool in unpacked(sent.tools)] == ["look", "later"]
    assert sent.late_tools is UNSET


def test_a_schema_is_what_the_answer_is_held_to() -> None:
    format = {"type": "json_schema", "schema": {"properties": {"z": {"const": "駅"}, "a": {}}}}
    for fields, param in (
        ({"output_config": {"format": format}}, "output_config.format.schema"),
        ({"output_format": format}, "output_format.schema"),
    ):
        form = generated(**fields).form
        assert form is not None
        assert form == StructuredOutput(kind="json_schema", text=form.text, param=param)
        assert list(json.loads(form.text)["properties"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        (said("tool", "x"), "messages[0].role"),
        (said("user", [block("hologram")]), "messages[0].content[0].type"),
        (said("user", [block("tool_use", id="a", name="f", input={})]), "messages[0].content[0]"),
        (said("assistant", [block("tool_result", tool_use_id="a")]), "messages[0].content[0]"),
        (said("user", [block("tool_result")]), "messages[0].content[0].tool_use_id"),
        (said("user", [block("image", source={"type": "file"})]), "messages[0].content[0].source"),
        (said("system", [ADD]), "messages[0].content[0].tool.name"),
        (said("assistant", [CUT]), "messages[0].content[0]"),
        (said("system", [change("addition", type="tool_definition", definition={})]),
         "messages[0].content[0].tool.definition.name"),
        (said("system", [CUT]) | {"tools": [LOOK], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"system": 7}, "system"),
        ({"tools": [{"description": "no name"}]}, "tools[0].name"),
        ({"tools": [LOOK, {"name": "x", "input_schema": []}]}, "tools[1].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "leap"}, "tools": [LOOK]}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "all"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param in error.message
