"""Request bodies recorded from Claude Code: every field and every tool is accepted."""

from __future__ import annotations

import json
from typing import Any

from broker.dialects.messages import body, request
from broker.dialects.messages.conversation import conversation
from protocol.conversation import unpack
from protocol.messages import Generate
from protocol.wire import decode_to_worker, encode

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "x" * 1200},
        "env": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "mode": {"anyOf": [{"type": "string", "const": "read"}, {"type": "null"}]},
        "limit": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    },
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = [{"name": f"Tool{n}", "description": "d" * 1500, "input_schema": SCHEMA} for n in range(24)]


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def turn() -> dict[str, Any]:
    """Request in the middle of a task."""
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    call = {"type": "tool_use", "id": "toolu_1", "name": "Tool0", "input": {"path": "a.py"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such file", "is_error": True}
    return {
        "model": "m",
        "max_tokens": 32_000,
        "stream": True,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        "system": [
            text("x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch=00001;"),
            text("You are Claude Code.", **CACHED),
            text("s" * 12_000, **CACHED),
        ],
        "messages": [
            {"role": "user", "content": [text("<reminder>"), text("Read a.py", **CACHED)]},
            {"role": "system", "content": "Tools have changed."},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result | CACHED]},
        ],
        "tools": TOOLS,
    }


def sent(told: dict[str, Any]) -> Generate:
    read = body.read(json.dumps(told).encode())
    messages = conversation(read, system_in_place=True).messages
    message = request.generate(read, messages, [], id="a", incarnation="gateway", thinks=True)
    arrived, _ = decode_to_worker(encode(message))
    assert arrived == message
    return message


def test_a_turn_arrives_with_all_its_tools() -> None:
    assert len(json.dumps(TOOLS)) > 64_000
    message = sent(turn())
    told = unpack(message)
    shown = [tool["function"] for tool in told.tools or []]
    assert shown == [
        {"name": tool["name"], "description": tool["description"], "parameters": SCHEMA} for tool in TOOLS
    ]
    assert told.options == {"reasoning_effort": "medium"}
    assert (message.max_tokens, message.thinking_budget, message.calling) == (32_000, None, None)
    roles = [spoken["role"] for spoken in told.messages or []]
    assert roles == ["system", "user", "system", "assistant", "tool"]
    assert "billing" not in str(told.messages)
