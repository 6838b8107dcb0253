"""Normalizes a conversation of any dialect to the canonical form that chat templates receive.

Equal conversations then make equal prompts and hit the same cached prefix. Templates that demand one leading
system message and alternating roles accept what agents really send. In the canonical form:

* roles are system, user, assistant and tool; a system message is at index 0 only, unless the template accepts
  later ones: what comes before the first answer is moved there, later ones become text of the turn they
  follow, so that the prompt of the next turn begins with this one's;
* no two neighbours share role and name, except tool results, which are never merged;
* `content` is a string or, with images or videos, a list of text parts and placeholders,
  `{"type": "image"}` and `{"type": "video"}`;
* a key is absent rather than null or empty, except `content`;
* no system message begins with a line that changes with each request (`VOLATILE_HEADS`), and none counts the
  tokens that are left (`_COUNTER`).

Text parts of one message are joined by a newline, as in other OpenAI-compatible servers; messages are joined
by a blank line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from broker.dialects.body import wrong
from broker.dialects.parts import Attachment, Part
from broker.dialects.parts import read as read_part
from broker.dialects.parts import write as write_part
from protocol.arguments import is_portable
from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS, ends_with_prefill

VOLATILE_HEADS = (
    "x-anthropic-billing-header:",  # Claude Code: `cc_version` varies by conversation, `cch` by request
)
"""Exact beginnings of lines that agents put before their system prompts and that change between requests.

They are meant for billing, not for the model. A prompt that begins with one shares no prefix with cached
prompts, so each conversation, or each request, would be prefilled from its first token. Any other beginning
of a system prompt is left unchanged.
"""
_VOLATILE_LINES = re.compile(rf"(?:(?:{'|'.join(map(re.escape, VOLATILE_HEADS))})[^\n]*(?:\n+|\Z))+")
_LEFT = "<total_tokens>[0-9]+ tokens left</total_tokens>"
_COUNT = rf"(?:{_LEFT}|<system-reminder>\n{_LEFT}\n</system-reminder>)"
_COUNTER = re.compile(rf"\A{_COUNT}(?:\n+|\Z)|(?<!\n)\n++{_COUNT}(?=\n|\Z)")
"""Lines that Claude Code puts into a system message behind each turn: a budget of its own, whose number says
nothing about this model's context. Only whole lines of exactly this form are dropped."""
_ROLES = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Canonical messages, with the images and videos in the order of their placeholders."""

    messages: list[dict[str, Any]]
    attachments: tuple[Attachment, ...]


@dataclass(frozen=True, slots=True)
class _Message:
    """A message before it is merged with its neighbours. Absent fields are empty."""

    role: str
    name: str
    content: str | list[Part]
    reasoning: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str


def normalize(messages: Sequence[Mapping[str, Any]], *, system_in_place: bool = False) -> Conversation:
    """Return the canonical form of type-checked chat messages: idempotent, sharing no mutable data with them.

    `system_in_place`: the template accepts system messages anywhere, so none is moved. Without it, those
    behind the first answer still are not hoisted: agents send one behind each turn, and hoisting it would
    change the prompt from its start, which loses the whole cached prefix.
    Raises ValueError for a content part of unknown type, which the dialect should have refused.
    """
    read = list(_read(messages))
    if not system_in_place:
        read = _with_leading_system(read)
    runs = groupby(enumerate(read), key=_run_key)
    joined = [_join([message for _, message in run]) for _, run in runs]
    # Collected last, since hoisting may have changed the order of the images.
    attachments: list[Attachment] = []
    return Conversation([_write_message(message, attachments) for message in joined], tuple(attachments))


# Reading


def _read(messages: Sequence[Mapping[str, Any]]) -> Iterator[_Message]:
    for index, message in enumerate(messages):
        read = _read_message(message, f"messages[{index}]")
        if read.role == "system" and isinstance(read.content, str) and read.content:
            read = replace(read, content=without_volatile(read.content))
            if not read.content:
                continue  # messages sent empty stay: without one, some templates insert a default
        yield read


def _read_message(message: Mapping[str, Any], param: str) -> _Message:
    role = _ROLES.get(message["role"], message["role"])
    by_assistant = role == "assistant"
    return _Message(
        role=role,
        name=message.get("name") or "",
        content=_read_content(message, param),
        reasoning=_read_reasoning(message) if by_assistant else "",
        tool_calls=_read_tool_calls(message) if by_assistant else [],
        tool_call_id=(message.get("tool_call_id") or "") if role == "tool" else "",
    )


def _read_content(message: Mapping[str, Any], param: str) -> str | list[Part]:
    content = message.get("content") or ""
    parts: list[Part]
    if isinstance(content, str):
        parts = [content]
    else:
        parts = [read_part(part, f"{param}.content[{index}]") for index, part in enumerate(content)]
    parts.append(message.get("refusal") or "")
    parts = [part for part in parts if part != ""]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _read_reasoning(message: Mapping[str, Any]) -> str:
    # Clients that send both send the same text twice.
    return message.get("reasoning_content") or message.get("reasoning") or ""


def _read_tool_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = list(message.get("tool_calls") or [])
    if message.get("function_call"):  # the legacy form of tool_calls, used with the function role
        calls.append({"function": message["function_call"]})
    return [_read_tool_call(call) for call in calls]


def _read_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    canonical = {
        "type": "function",
        "function": {"name": function["name"], "arguments": _read_arguments(function.get("arguments"))},
    }
    return {"id": call["id"], **canonical} if call.get("id") else canonical


def _read_arguments(arguments: Any) -> Any:
    """Return arguments as an object. What is no portable JSON object is text: as written, if it was text."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return _copy(arguments) if is_portable(arguments) else json.dumps(arguments)
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
        if isinstance(parsed, str):  # encoded twice
            parsed = json.loads(parsed)
    except (ValueError, RecursionError):  # ValueError also for integers of thousands of digits
        return arguments
    return parsed if isinstance(parsed, dict) and is_portable(parsed) else arguments


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


# Joining


def _run_key(numbered: tuple[int, _Message]) -> tuple[str, str | int]:
    """Return the merge key: neighbours with equal keys become one message."""
    index, message = numbered
    match message.role:
        case "tool":
            return "tool", index
        case "system":
            return "system", ""  # whatever the names: templates accept only one system message
        case role:
            return role, message.name


def _join(run: list[_Message]) -> _Message:
    names = {message.name for message in run}
    return _Message(
        role=run[0].role,
        name=names.pop() if len(names) == 1 else "",
        content=_join_contents([message.content for message in run]),
        reasoning=_join_texts([message.reasoning for message in run]),
        tool_calls=[call for message in run for call in message.tool_calls],
        tool_call_id=run[0].tool_call_id,
    )


def _join_contents(contents: list[str | list[Part]]) -> str | list[Part]:
    """Join strings by a blank line and concatenate lists. Beside a list, a string becomes a text part."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return _join_texts(texts)
    parts: list[Part] = []
    for is_text, run in groupby(contents, key=lambda content: isinstance(content, str)):
        if is_text:
            parts.append(_join_texts([text for text in run if isinstance(text, str)]))
        else:
            parts.extend(part for listed in run for part in listed)
    return [part for part in parts if part != ""]


def _join_texts(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text)


def without_volatile(text: str) -> str:
    """Return a system message without its leading volatile lines and without counters. Idempotent."""
    text = _COUNTER.sub("", text)
    found = _VOLATILE_LINES.match(text)
    return text[found.end() :] if found else text


# Placing system messages


def _with_leading_system(read: Sequence[_Message]) -> list[_Message]:
    """Return the messages with system messages at the beginning alone: those before the first answer are
    hoisted; later ones become text of the turn, of the user or a tool, that they follow, or else precede."""
    answered = next((index for index, message in enumerate(read) if message.role == "assistant"), len(read))
    # A stable sort keeps the order of all others.
    placed = sorted(read[:answered], key=lambda message: message.role != "system")
    late: _Message | None = None  # behind an answer, until it is known what comes next
    for is_system, run in groupby(read[answered:], key=lambda message: message.role == "system"):
        messages = [*run]
        if is_system and placed[-1].role == "assistant":
            late = replace(_join(messages), role="user", name="")
        elif is_system:
            placed[-1] = _with_texts(placed[-1], [placed[-1], _join(messages)])
        else:
            if late and messages[0].role != "assistant":
                messages[0] = _with_texts(messages[0], [late, messages[0]])
            elif late:
                placed.append(late)
            placed += messages
            late = None
    return [*placed, late] if late else placed


def _with_texts(message: _Message, run: Sequence[_Message]) -> _Message:
    return replace(message, content=_join_contents([each.content for each in run]))


# Writing


def _write_message(message: _Message, attachments: list[Attachment]) -> dict[str, Any]:
    optional = {
        "name": message.name,
        "reasoning_content": message.reasoning,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
    }
    present = {key: value for key, value in optional.items() if value}
    return {"role": message.role, "content": _write_content(message.content, attachments), **present}


def _write_content(content: str | list[Part], attachments: list[Attachment]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    attachments.extend(part for part in content if isinstance(part, Attachment))
    return [write_part(part) for part in content]


# --- Assistant prefill: the last message is the assistant's, and the model continues it --------------


def prompt_end_options(
    messages: Sequence[Mapping[str, Any]], *, continues: bool | None, opens: bool | None
) -> dict[str, str]:
    """Return the worker's option for the end of the prompt, to add to the template's arguments.

    `continues`, `opens`: vLLM's `continue_final_message` and `add_generation_prompt`. Raises `RequestError`
    if both are true, and if there is no message to continue.
    """
    param = "continue_final_message"
    if not continues:
        return {PROMPT_ENDS: BEFORE_TURN} if opens is False else {}
    if opens:
        raise wrong(param, "and 'add_generation_prompt' cannot both be true")
    if not ends_with_prefill(messages):
        raise wrong(param, "requires a last message of the assistant with text and without tool calls")
    return {PROMPT_ENDS: IN_MESSAGE}
