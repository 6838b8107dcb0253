"""Request bodies of coding agents: every field and every tool is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.dialects import chat, chat_body
from protocol.conversation import Conversation, unpack
from protocol.messages import Generate
from protocol.wire import decode_to_worker, encode

INTEGER_MAX = 2**53 - 1  # JavaScript's, written by agents as the maximum of every integer
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_0", "arguments": '{"path": "a.py"}'}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def schema(**more: Any) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "x" * 400, "pattern": "^[^\\0]+$", "minLength": 1},
            "url": {"type": "string", "format": "uri"},
            "offset": {"type": "integer", "minimum": -INTEGER_MAX, "maximum": INTEGER_MAX},
            "limit": {"type": "number", "exclusiveMinimum": 0},
            "mode": {"anyOf": [{"const": "read"}, {"enum": ["write", None]}, {"type": "null"}]},
            "env": {"type": "object", "propertyNames": {"pattern": "^[A-Z]+$"}, "additionalProperties": {}},
            "edits": {"type": "array", "items": {"$ref": "#/$defs/edit"}, "minItems": 1},
        },
        "$defs": {"edit": {"type": "object", "properties": {"old": {"type": "string"}}}},
        "required": ["path"],
        "additionalProperties": False,
        **more,
    }


def functions(count: int, description: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": f"read_{n}", "description": description, "parameters": schema(), **more},
        }
        for n in range(count)
    ]


def without_type(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"function": tool["function"]} for tool in tools]


def part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def turn(content: Any, result: Any) -> list[dict[str, Any]]:
    """Return a tool call and its result, as two messages."""
    calling = {"role": "assistant", "tool_calls": [CALL]} | ({} if content is ... else {"content": content})
    return [calling, {"role": "tool", "tool_call_id": "call_1", "content": result}]


AGENTS: dict[str, dict[str, Any]] = {
    "pi": {
        "model": "m",
        "max_completion_tokens": 16_384,
        "store": False,
        **STREAMED,
        "messages": [{"role": "developer", "content": "s"}, user(part("one")), *turn(None, "done")],
        "tools": functions(4, "d", strict=False),
    },
    "Codex": {
        "model": "m",
        "store": False,
        **STREAMED,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "messages": [
            {"role": "developer", "content": part("s" * 17_000), "id": "msg_1"},
            {"role": "developer", "content": part("s"), "id": "msg_2"},
            {**user(part("one")), "id": "msg_3"},
            *turn(..., "done"),
        ],
        "tools": [
            *functions(7, "d" * 300, strict=False),
            {"type": "namespace", "name": "files", "tools": functions(2, "nested")},
            {"type": "web_search", "external_web_access": True},
        ],
    },
    "Claude Code": {
        "model": "m",
        "max_tokens": 32_000,
        **STREAMED,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "system", "content": [*part("one"), *part("two"), *part("three")]},
            user(part("one")),
            {"role": "system", "content": "a reminder"},
            *turn("", part("done")),
            user("two"),
        ],
        "tools": without_type(functions(24, "d" * 1_500)),
    },
}


def sent(body: dict[str, Any]) -> Generate:
    read = chat_body.read(json.dumps(body).encode())
    messages = chat.conversation(read, system_in_place=True).messages
    message = chat.generate(read, messages, [], id="a", incarnation="gateway")
    arrived, _ = decode_to_worker(encode(message))
    assert arrived == message
    return message


def offered(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tools that a chat template must get: every callable one, without its `strict` field."""
    given = [tool["function"] for tool in body.get("tools", []) if "function" in tool]
    shown = [{name: it for name, it in each.items() if name != "strict"} for each in given]
    return [{"type": "function", "function": each} for each in shown]


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_request_is_translated_completely(agent: str) -> None:
    body = AGENTS[agent]
    message = sent(body)
    conversation: Conversation = unpack(message)
    assert list(conversation.tools or []) == offered(body)
    assert (message.form, message.calling) == (None, None)
    assert message.max_tokens == body.get("max_completion_tokens", body.get("max_tokens"))
    calls = [call for spoken in conversation.messages or [] for call in spoken.get("tool_calls", [])]
    arguments = [call["function"]["arguments"] for call in calls]
    assert arguments == [{"path": "a.py"}] * ("tools" in body)
