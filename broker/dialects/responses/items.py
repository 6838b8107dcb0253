"""Conversion of conversation items to chat messages, so that both dialects make the same prompt.

One assistant turn is a single chat message but several items: reasoning, texts and tool calls. Items of
built-in tools, which do not run here, mean nothing to the models and are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from broker.dialects.body import convert
from broker.dialects.responses.content import content_of, text_of, wrong
from broker.dialects.responses.custom import INPUT
from broker.dialects.responses.encrypted_content import unseal
from broker.dialects.responses.tools import flat_name

Item = Mapping[str, Any]

PASSED_OVER = frozenset(
    {
        "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call",
        "compaction_trigger", "computer_call", "computer_call_output", "configuration_update",
        "file_search_call", "image_generation_call", "local_shell_call", "local_shell_call_output",
        "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "program",
        "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output",
        "web_search_call",
    }
)  # fmt: skip

SUMMARY = "Summary of the conversation so far:"
_OURS = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})_[0-9]+")


class Message(Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]] | None = None
    id: str | None = None


class Call(Struct):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    id: str | None = None


class CustomCall(Struct):
    """Call of a custom tool, whose input is free text."""

    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None
    id: str | None = None


class CallOutput(Struct):
    call_id: str
    output: str | list[dict[str, Any]] | None = None


class ReasoningText(Struct):
    text: str = ""


class ReasoningItem(Struct):
    """Reasoning, as far as it can be read: as `encrypted_content`, in full, or as a summary."""

    encrypted_content: str | None = None
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    id: str | None = None

    def read(self) -> str:
        """Return the reasoning; empty if it is unreadable because it comes from another server."""
        if self.encrypted_content and (thought := unseal(self.encrypted_content)) is not None:
            return thought
        return "\n\n".join(part.text for part in self.content or self.summary or [])


class CompactionItem(Struct):
    """Summary of an earlier part of the conversation, made by `compaction`."""

    encrypted_content: str | None = None


ITEMS: Mapping[type, tuple[str, ...]] = {
    Message: ("message",),
    Call: ("function_call",),
    CustomCall: ("custom_tool_call",),
    CallOutput: ("function_call_output", "custom_tool_call_output"),
    ReasoningItem: ("reasoning",),
    CompactionItem: ("compaction",),
}
"""Item types by the struct that decodes them."""


@dataclass(slots=True)
class _Pieces:
    """Text from several items. Items of one response are concatenated, others separated by a blank line."""

    text: str = ""
    last: str = ""

    def add(self, text: str, id: str | None) -> None:
        if not text:
            return
        ours = _OURS.fullmatch(id or "")
        response = ours[1] if ours else ""
        if self.text and not (response and response == self.last):
            self.text += "\n\n"
        self.text += text
        self.last = response


@dataclass(slots=True)
class _Turn:
    """One assistant turn: the consecutive items of the model."""

    thought: _Pieces = field(default_factory=_Pieces)
    content: _Pieces = field(default_factory=_Pieces)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": self.content.text,
            "reasoning_content": self.thought.text,
            "tool_calls": self.calls,
        }


Placed = tuple[str, Item]
"""The place of an item in the body, such as `input[2]`, and the item."""


def messages(items: Sequence[Placed]) -> list[dict[str, Any]]:
    """Return the items as chat messages. Raises `RequestError` for an invalid item."""
    spoken: list[_Turn | dict[str, Any]] = []
    for place, item in items:
        kind = kind_of(item)
        if kind in PASSED_OVER:
            continue
        if kind == "compaction":
            spoken += _summaries(item, place)
            continue
        if not _is_said(kind, item):
            spoken.append(_heard(kind, item, place))
            continue
        turn = spoken[-1] if spoken else None
        if not isinstance(turn, _Turn):
            turn = _Turn()
            spoken.append(turn)
        _say(turn, kind, item, place)
    return [one.message() if isinstance(one, _Turn) else one for one in spoken]


def _summaries(item: Item, place: str) -> list[dict[str, Any]]:
    """Return a summary as a message; none if it is unreadable because it comes from another server."""
    sealed = convert(item, CompactionItem, place).encrypted_content
    summary = unseal(sealed) if sealed else None
    return [{"role": "user", "content": f"{SUMMARY}\n\n{summary}"}] if summary else []


def kind_of(item: Item) -> str:
    """Return an item's type. Messages and references may lack one."""
    if (kind := item.get("type")) is not None:
        return str(kind)
    return "item_reference" if "role" not in item and "id" in item else "message"


def _is_said(kind: str, item: Item) -> bool:
    """Return whether the item was generated by the model."""
    if kind == "message":
        return item.get("role") == "assistant"
    return kind in ("function_call", "custom_tool_call", "reasoning")


def _say(turn: _Turn, kind: str, item: Item, place: str) -> None:
    match kind:
        case "reasoning":
            thought = convert(item, ReasoningItem, place)
            turn.thought.add(thought.read(), thought.id)
        case "function_call":
            call = convert(item, Call, place)
            turn.calls.append(_called(call, call.arguments))
        case "custom_tool_call":
            custom = convert(item, CustomCall, place)
            turn.calls.append(_called(custom, {INPUT: custom.input}))
        case _:
            said = convert(item, Message, place)
            turn.content.add(text_of(said.content, f"{place}.content"), said.id)


def _called(call: Call | CustomCall, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": flat_name(call.namespace, call.name), "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _heard(kind: str, item: Item, place: str) -> dict[str, Any]:
    if kind == "message":
        message = convert(item, Message, place)
        return {"role": message.role, "content": content_of(message.content, f"{place}.content")}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = convert(item, CallOutput, place)
        content = content_of(output.output, f"{place}.output")
        return {"role": "tool", "tool_call_id": output.call_id, "content": content}
    raise wrong(f"{place}.type", f"unknown item type {kind[:64]!r}")


# --- as they are listed ------------------------------------------------------------------------------


def listed(items: Sequence[Item], stem: str) -> list[dict[str, Any]]:
    """Return input items in the stored and listed form: with type, id and, for messages, content parts.

    Missing ids are made from `stem`.
    """
    return [_listed(item, f"{stem}_i{number}") for number, item in enumerate(items)]


def _listed(item: Item, id: str) -> dict[str, Any]:
    kind = kind_of(item)
    whole = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{id}"}
    if kind == "message" and isinstance(content := item.get("content") or "", str):
        by_assistant = item.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if by_assistant else {"type": "input_text"}
        whole["content"] = [{**part, "text": content}]
    return whole if kind == "reasoning" else {"status": "completed", **whole}


_PREFIXES = {
    "compaction": "cmp",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "function_call": "fc",
    "function_call_output": "fco",
    "message": "msg",
    "reasoning": "rs",
}
