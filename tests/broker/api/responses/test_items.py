"""Items of the responses API become the same conversation as chat messages."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from broker.api.responses import body, request
from broker.api.responses.content import UNREADABLE, seal, unseal
from broker.api.responses.history import recall
from broker.api.responses.items import PASSED_OVER, TRIGGER, listed
from broker.dialects.normalize import Conversation
from broker.dialects.parts import Image
from broker.dialects.reasoning import Reasoning
from protocol.errors import RequestError
from tests.broker.api.responses.stored_responses import response_store, result_of

STEM = "0123456789abcdef01234567"
IMAGE = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


def by_responses(input: Any, **fields: Any) -> Conversation:
    read = body.read(json.dumps({"input": input, **fields}).encode())
    history = result_of(recall(read, response_store(), "", bytes_max=0))
    return request.conversation(read, history.placed(), system_in_place=True)


def by_chat(messages: list[dict[str, Any]], **fields: Any) -> Conversation:
    read = chat_body.read(json.dumps({"messages": messages, **fields}).encode())
    return chat.conversation(read, system_in_place=True)


def refusal(input: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        by_responses(input)
    return caught.value


def message(role: str, text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


CALLS = [
    {"id": f"call_{n}", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    for n in (1, 2)
]
CHAT = [
    message("system", "You are an agent."),
    message("user", [{"type": "text", "text": "Read a and b."}, {"type": "text", "text": "Both."}]),
    message("assistant", "I will.", reasoning_content="Two files.", tool_calls=CALLS),
    message("tool", "A", tool_call_id="call_1"),
    message("tool", [{"type": "text", "text": "B"}], tool_call_id="call_2"),
    message("assistant", "A and B.", reasoning_content="Done."),
    message("user", "Thanks"),
]
ANSWERED = {"type": "output_text", "text": "I will.", "annotations": [], "logprobs": []}
OUTPUT = {"type": "function_call_output", "call_id": "call_1"}
ITEMS: list[dict[str, Any]] = [
    message("user", [{"type": "input_text", "text": text} for text in ("Read a and b.", "Both.")]),
    {"type": "reasoning", "id": f"rs_{STEM}_0", "summary": [], "encrypted_content": seal("Two files.")},
    message("assistant", [ANSWERED], type="message", id=f"msg_{STEM}_1"),
    *({"type": "function_call", "call_id": call["id"], **call["function"]} for call in CALLS),
    OUTPUT | {"output": "A"},
    OUTPUT | {"call_id": "call_2", "output": [{"type": "input_text", "text": "B"}], "status": "completed"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Done."}]},
    message("assistant", "A and B."), message("user", "Thanks"),
]  # fmt: skip


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
turns = st.lists(st.tuples(texts, texts, texts, st.lists(texts, max_size=2)), min_size=1, max_size=4)


@settings(max_examples=50)
@given(turns)
def test_any_conversation_is_the_same_as_in_a_chat(spoken: list[tuple[str, str, str, list[str]]]) -> None:
    items: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for asked, thought, said, results in spoken:
        items.append(message("user", asked))
        items.append({"type": "reasoning", "summary": [], "encrypted_content": seal(thought)})
        items.append({"type": "message", **message("assistant", said)})
        calls = [{"id": f"c{n}", "function": {"name": "f", "arguments": "{}"}} for n in range(len(results))]
        messages += [message("user", asked), message("assistant", said, reasoning=thought, tool_calls=calls)]
        for n, result in enumerate(results):
            items.append({"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"})
            messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": result})
        for n, result in enumerate(results):
            items.append({"type": "function_call_output", "call_id": f"c{n}", "output": result})
    assert by_responses(items) == by_chat(messages)


def test_a_conversation_with_tools_is_the_same_as_in_a_chat() -> None:
    by_items = by_responses(ITEMS, instructions="You are an agent.")
    assert by_items == by_chat(CHAT)
    assert len(by_items.messages) == len(CHAT)


def test_texts_of_one_response_are_one_and_of_different_ones_told_apart() -> None:
    items: list[dict[str, Any]] = [message("user", "x")]
    for number, text in enumerate(["one ", "two"]):
        items.append(message("assistant", text, id=f"msg_{STEM}_{2 * number}"))
        items.append({"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"})
    others = [message("assistant", "three", id=f"msg_{'f' * 24}_0"), message("assistant", "four")]
    said = by_responses([*items, *others, message("assistant", "")]).messages[1]
    assert said["content"] == "one two\n\nthree\n\nfour"
    assert [call["id"] for call in said["tool_calls"]] == ["c0", "c1"]


SUMMARY = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"summary": SUMMARY, "encrypted_content": "gAAAAABo"}, "a\n\nb"),
        ({"summary": [], "content": None, "encrypted_content": seal("d")}, "d"),
        *(
            ({"summary": [], "encrypted_content": foreign}, None)
            for foreign in ("", "gAAAAABo", "x" * 400, "駅", "AAAA====", seal("hm")[:-4])
        ),
    ],
)
def test_a_thought_is_read_as_far_as_it_can_be(fields: dict[str, Any], text: str | None) -> None:
    items = [message("user", "x"), {"type": "reasoning", "id": "rs_1", **fields}, message("assistant", "y")]
    assert by_responses(items).messages[1].get("reasoning_content") == text


@given(st.integers(0, 55), st.integers(0, 255))
def test_damaged_encrypted_content_is_none(at: int, byte: int) -> None:
    sealed = bytearray(seal("what was thought of it, in words").encode())
    damaged = bytes(sealed[:at]) + bytes([byte]) + bytes(sealed[at + 1 :])
    read = unseal(damaged.decode("latin-1"))
    assert read is None or damaged == bytes(sealed)


def test_images_are_set_aside_wherever_they_are() -> None:
    picture = {"type": "input_image", "image_url": IMAGE, "detail": "auto"}
    items = [
        message("user", [{"type": "input_text", "text": "?"}, picture]),
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [picture]},
    ]
    conversation = by_responses(items)
    places = ("input[0].content[1]", "input[2].output[0]")
    assert conversation.attachments == tuple(Image(IMAGE, place, "auto") for place in places)
    assert conversation.messages[2]["content"] == [{"type": "image"}]


SHOT = {"type": "computer_screenshot", "image_url": IMAGE}
TASK = [{"type": "input_text", "text": "Task:"}, {"type": "encrypted_content", "encrypted_content": "Sing."}]
COMPACTED = "Summary of the conversation so far:"
HEAD = "Message from agent /lead to agent /lead/a:\n"
UNREAD = [TASK[0], TASK[1] | {"encrypted_content": "gAAAAABo" * 9}]
FOUND = {
    "type": "tool_search_output",
    "tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f"}]}],
}
SHELL = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
CHILD = {"type": "agent_message", "author": "/lead", "recipient": "/lead/a"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f"}
CODE = {"type": "code_interpreter_call", "code": "1", "outputs": [], "status": "ok"}
MCP = {"type": "mcp_call", "id": "m", "server_label": "fs", "name": "ls", "arguments": '{"p": "a"}'}


@pytest.mark.parametrize(
    ("item", "called", "content"),
    [
        (CHILD | {"content": TASK}, None, HEAD + "Task:\nSing."),
        (CHILD | {"content": UNREAD}, None, HEAD + f"Task:\n{UNREADABLE}"),
        (CHILD | {"content": [TASK[1] | {"encrypted_content": seal("Hum.")}]}, None, HEAD + "Hum."),
        ({"type": "compaction_summary", "encrypted_content": seal("s")}, None, f"{COMPACTED}\n\ns"),
        ({"type": "context_compaction", "encrypted_content": "Plain."}, None, f"{COMPACTED}\n\nPlain."),
        (FOUND, None, 'Loaded tools:\n{"name":"n__f"}'),
        (FOUND | {"tools": []}, None, "Loaded tools:\nnone"),
        ({"type": "tool_search_call", "arguments": {"q": "a"}}, ("tool_search", {"q": "a"}), None),
        ({"type": "local_shell_call", "action": {"type": "exec", "a": 1}}, ("local_shell", {"a": 1}), None),
        ({"type": "computer_call", "action": {"type": "wait"}}, ("computer", {"type": "wait"}), None),
        ({"type": "shell_call_output", "output": [SHELL]}, None, '{"stdout":"a","outcome":{"exit_code":0}}'),
        ({"type": "apply_patch_call_output", "status": "failed", "output": None}, None, "failed"),
        ({"type": "computer_call_output", "call_id": "c", "output": SHOT}, None, [{"type": "image"}]),
        ({"type": "computer_call_output", "output": {"type": {}, "a": 1}}, None, '{"a":1}'),
        ({"type": "program_output", "result": "3"}, None, "3"),
        (CALLED | {"namespace": "mcp__fs__", "arguments": "{}"}, ("mcp__fs__f", {}), None),
        (CALLED | {"type": "custom_tool_call", "input": "x"}, ("f", {"input": "x"}), None),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "done"}, None, "done"),
        ({"type": "function_call_output", "name": "f", "output": "late"}, None, "late"),
        (CODE, ("code_interpreter", {"code": "1"}), "ok"),
        (MCP | {"output": "a.py"}, ("fs__ls", {"p": "a"}), "a.py"),
        (MCP | {"output": None}, None, None),
        ({"type": "file_search_call", "queries": ["a"], "results": None}, None, None),
        ({"type": "mcp_approval_response", "approve": False}, None, '{"approve":false}'),
        *(({"type": kind, "id": "x"}, None, None) for kind in sorted(PASSED_OVER)),
    ],
)  # fmt: skip
def test_an_item_adds_its_text_call_and_result(item: Any, called: Any, content: Any) -> None:
    made = by_responses([message("system", "s"), item]).messages[1:]
    calls = [call["function"] for said in made for call in said.get("tool_calls", ())]
    assert calls == ([] if called is None else [{"name": called[0], "arguments": called[1]}])
    assert [said["content"] for said in made if said["role"] != "assistant"] == (
        [] if content is None else [content]
    )


def test_system_messages_are_joined_and_updates_replace_options() -> None:
    items = [message("developer", "b"), message("system", "c"), message("user", "x")]
    both = [message("system", "a\n\nb\n\nc"), message("user", "x")]
    assert by_responses(items, instructions="a").messages == both
    form = {"type": "json_object"}
    updates = [
        {"reasoning": {"effort": "low"}}, {"text": {"format": form}}, {"reasoning": {"effort": "high"}},
    ]  # fmt: skip
    placed = [("", {"type": "configuration_update", **update}) for update in updates]
    made = request.configured(body.read(b'{"input": "x", "reasoning": {"summary": "auto"}}'), placed)
    assert made.reasoning == Reasoning(effort="high", summary="auto")
    assert made.text == body.Text(format=body.Format(type="json_object"))


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0]"),
        (message("user", [{"type": "input_video"}]), "input[0].content[0]"),
        (message("user", [{"type": "input_image", "file_id": "f"}]), "input[0].content[0].image_url"),
        ({"role": "king", "content": "x"}, "input[0].role"),
        ({"type": "", "role": "user", "content": "x"}, "input[0].type"),
        ({"role": "user", "content": [{"type": "input_text", "text": 3}]}, "input[0].content[0].text"),
        (message("assistant", [{"type": "input_image", "image_url": IMAGE}]), "input[0].content[0]"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "c", "output": {"a": 1}}, "input[0].output"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].id"),
        ({"type": TRIGGER}, "input[0].type"),
    ],
)
def test_invalid_item_error_names_the_param(item: dict[str, Any], param: str) -> None:
    assert refusal([]).param == "input"
    assert refusal([item]).param == param


def test_items_are_listed_with_types_and_ids_and_mean_the_same() -> None:
    items = [*ITEMS, message("user", None), {"id": "mine", "type": "web_search_call"}]
    shown = listed(items, STEM)
    assert [item["id"] for item in shown[:2]] == [f"msg_{STEM}_i0", f"rs_{STEM}_0"]
    assert shown[-1]["id"] == "mine"
    assert len({item["id"] for item in shown}) == len(shown)
    assert shown[9]["content"] == [{"type": "input_text", "text": "Thanks"}]
    assert shown[8]["content"] == [{"type": "output_text", "annotations": [], "text": "A and B."}]
    assert all(item["type"] for item in shown)
    assert by_responses(shown) == by_responses(items)
