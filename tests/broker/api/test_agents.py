"""Request bodies recorded from coding agents: every field and every tool is accepted."""

from __future__ import annotations

import json
from typing import Any

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from broker.api.messages import body, request
from broker.api.messages.conversation import conversation
from protocol.conversation import unpack
from protocol.messages import Generate
from protocol.wire import decode_to_worker, encode

INTEGER_MAX = 2**53 - 1  # JavaScript's, written by agents as the maximum of every integer
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_0", "arguments": '{"path": "a.py"}'}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
    "properties": {
        "path": {"type": "string", "description": "x" * 400, "pattern": "^[^\\0]+$", "minLength": 1},
        "url": {"type": "string", "format": "uri"},
        "offset": {"type": "integer", "minimum": -INTEGER_MAX, "maximum": INTEGER_MAX},
        "limit": {"type": "number", "exclusiveMinimum": 0},
        "mode": {"anyOf": [{"const": "read"}, {"enum": ["write", None]}, {"type": "null"}]},
        "env": {"type": "object", "propertyNames": {"pattern": "^[A-Z]+$"}, "additionalProperties": {}},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/edit"}, "minItems": 1},
    },
    "$defs": {"edit": {"type": "object", "properties": {"old": {"type": "string"}}}}, "required": ["path"],
    "additionalProperties": False,
}  # fmt: skip


def functions(count: int, description: str, **more: Any) -> list[dict[str, Any]]:
    function = {"description": description, "parameters": SCHEMA, **more}
    return [{"type": "function", "function": {"name": f"read_{n}", **function}} for n in range(count)]


def text(text: str, **cached: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", **cached}}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


CODEX: dict[str, Any] = {
    "model": "m", "store": False, **STREAMED, "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"}, "prompt_cache_key": "k", "client_metadata": {"a": "b"},
    "parallel_tool_calls": True, "tool_choice": "auto",
    "messages": [
        {"role": "developer", "content": [text("s" * 17_000)], "id": "msg_1"},
        {"role": "developer", "content": [text("s")], "id": "msg_2"}, user([text("one")], id="msg_3"),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ],
    "tools": [
        *functions(7, "d" * 300, strict=False),
        {"type": "namespace", "name": "files", "tools": functions(2, "nested")},
        {"type": "web_search", "external_web_access": True},
    ],
}  # fmt: skip
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "Tool0", "input": {"path": "a.py"}}
NO_FILE = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such file", "is_error": True}
CLAUDE_CODE: dict[str, Any] = {
    "model": "m", "max_tokens": 32_000, "stream": True, "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"}, "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch=00001;"),
        text("You are Claude Code.", ttl="1h"), text("s" * 12_000, ttl="1h"),
    ],
    "messages": [
        user([text("<reminder>"), text("Read a.py", ttl="1h")]),
        {"role": "system", "content": "Tools have changed."},
        {"role": "assistant", "content": [THOUGHT, TOOL_USE]},
        user([NO_FILE | {"cache_control": {"type": "ephemeral"}}]),
    ],
    "tools": [{"name": f"Tool{n}", "description": "d" * 1500, "input_schema": SCHEMA} for n in range(24)],
}  # fmt: skip


def on_the_wire(message: Generate) -> Generate:
    arrived, _ = decode_to_worker(encode(message))
    assert arrived == message
    return message


def test_a_request_of_codex_is_translated_completely() -> None:
    read = chat_body.read(json.dumps(CODEX).encode())
    spoken = chat.conversation(read, system_in_place=True).messages
    message = on_the_wire(chat.generate(read, spoken, [], id="a", incarnation="gateway"))
    callable = [tool["function"] for tool in CODEX["tools"] if "function" in tool]
    shown = [{name: it for name, it in each.items() if name != "strict"} for each in callable]
    arrived = unpack(message)
    assert list(arrived.tools or []) == [{"type": "function", "function": each} for each in shown]
    assert (message.form, message.calling) == (None, None)
    calls = [call for each in arrived.messages or [] for call in each.get("tool_calls", [])]
    assert [call["function"]["arguments"] for call in calls] == [{"path": "a.py"}]


def test_a_turn_of_claude_code_arrives_with_all_its_tools() -> None:
    read = body.read(json.dumps(CLAUDE_CODE).encode())
    spoken = conversation(read, system_in_place=True).messages
    message = on_the_wire(request.generate(read, spoken, [], id="a", incarnation="gateway", thinks=True))
    arrived = unpack(message)
    assert [tool["function"] for tool in arrived.tools or []] == [
        {"name": tool["name"], "description": tool["description"], "parameters": SCHEMA}
        for tool in CLAUDE_CODE["tools"]
    ]
    assert arrived.options == {"reasoning_effort": "medium"}
    assert (message.max_tokens, message.thinking_budget, message.calling) == (32_000, None, None)
    roles = [each["role"] for each in arrived.messages or []]
    assert roles == ["system", "user", "system", "assistant", "tool"]
    assert "billing" not in str(arrived.messages)
