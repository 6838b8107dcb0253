"""A conversation with tools in all dialects: the same prompt, restored from the prefix cache each time."""

from __future__ import annotations

import json
from typing import Any

from tests.system import System

WORDS = " ".join(f"word{n}" for n in range(150))
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ARGUMENTS = {"path": "a.txt"}
SYSTEM, ASKED, THOUGHT, SAID, RESULT, THEN = "You are an agent.", WORDS, "A file.", "I will.", "steam", "Now?"


def by_chat(system: System) -> tuple[int, int]:
    function = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": json.dumps(ARGUMENTS)}}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": RESULT},
        {"role": "user", "content": THEN},
    ]
    tools = [{"type": "function", "function": function}]
    usage = ask(system, "/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 1})
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def by_responses(system: System) -> tuple[int, int]:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SAID}]},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c1", "output": RESULT},
        {"role": "user", "content": THEN},
    ]
    tools = [{"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}]
    body = {"instructions": SYSTEM, "input": items, "tools": tools, "max_output_tokens": 1}
    usage = ask(system, "/v1/responses", body)
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def by_messages(system: System) -> tuple[int, int]:
    said = [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""},
        {"type": "text", "text": SAID},
        {"type": "tool_use", "id": "c1", "name": "read", "input": ARGUMENTS},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": RESULT}]}
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result, {"type": "text", "text": THEN}]},
    ]
    tools = [{"name": "read", "description": "Reads.", "input_schema": SCHEMA}]
    system_blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
    ]
    body = {"system": system_blocks, "messages": messages, "tools": tools, "max_tokens": 1}
    usage = ask(system, "/v1/messages", body)
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0) + cached, cached


def ask(system: System, path: str, body: dict[str, Any]) -> Any:
    """Send a request and return the usage in the answer."""
    answer = system.http.post(path, json=body | {"model": "pocket"})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_a_conversation_is_the_same_prompt_in_every_dialect(system: System) -> None:
    asked = [by_chat, by_responses, by_messages, by_chat]
    (prompt, cached), *others = [by(system) for by in asked]
    assert cached < 20, "other prompts of the server share no more than their first words"
    assert prompt > len(WORDS.split())
    assert others == [(prompt, prompt - 1)] * len(others)
