"""Assistant prefill in chat and messages requests: what is sent to the worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.dialects import chat, chat_body
from broker.dialects.messages import body, request
from broker.dialects.messages.conversation import conversation
from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS, unpack
from protocol.errors import RequestError
from protocol.messages import Generate

ASKED = {"role": "user", "content": "Sing."}
BEGUN = {"role": "assistant", "content": "La, "}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


def chats(*messages: dict[str, Any], **fields: Any) -> Generate:
    read = chat_body.read(json.dumps({"messages": messages, **fields}).encode())
    canonical = chat.conversation(read, system_in_place=False).messages
    return chat.generate(read, canonical, [], id="a", incarnation="gateway")


def message(*messages: dict[str, Any], **fields: Any) -> Generate:
    document = {"model": "m", "max_tokens": 5, "messages": messages, **fields}
    read = body.read(json.dumps(document).encode())
    canonical = conversation(read, system_in_place=False).messages
    return request.generate(read, canonical, [], id="a", incarnation="gateway", thinks=False)


def ends(asked: Generate) -> Any:
    return unpack(asked).options.get(PROMPT_ENDS)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, None),
        ({"continue_final_message": False, "add_generation_prompt": True}, None),
        ({"continue_final_message": True}, IN_MESSAGE),
        ({"continue_final_message": True, "add_generation_prompt": False}, IN_MESSAGE),
        ({"add_generation_prompt": False}, BEFORE_TURN),
    ],
)
def test_a_chat_goes_on_where_it_is_told_to(fields: dict[str, Any], end: str | None) -> None:
    assert ends(chats(ASKED, BEGUN, **fields)) == end


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ((ASKED, BEGUN), {"add_generation_prompt": True}),
        ((ASKED,), {}),
        ((ASKED, {"role": "assistant", "content": ""}), {}),
        ((ASKED, {**BEGUN, "tool_calls": [CALL]}), {}),
    ],
)
def test_there_must_be_something_to_go_on_with(messages: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        chats(*messages, continue_final_message=True, **fields)
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("La, ", IN_MESSAGE),
        ([{"type": "text", "text": "La, "}], IN_MESSAGE),
        ([{"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "f", "input": {}}], None),
    ],
)
def test_a_last_message_of_the_assistants_begins_the_answer(content: Any, end: str | None) -> None:
    assert ends(message(ASKED, {"role": "assistant", "content": content})) == end


def test_any_other_message_is_history() -> None:
    assert ends(message(ASKED, BEGUN, ASKED)) is None
