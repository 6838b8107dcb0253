"""Early serialization of the parts of a request that only its worker reads: messages, tools, options.

A parsed conversation takes up to thirty times the bytes of its text, as every message is a dict. The gateway
keeps it until the request ends, for a resend, so it is packed as msgpack when the request is made. The packed
bytes go into the message unchanged; the wire format is the same as without packing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from protocol.errors import Code, RequestError
from protocol.messages import Generate

PROMPT_ENDS = "roundhouse_prompt_ends"
"""Option, not passed to the template: where the prompt ends. By default, after the generation prompt."""
IN_MESSAGE, BEFORE_TURN = "in_message", "before_turn"
"""Its values: within the last message, which the model continues; before the generation prompt."""

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[list[dict[str, Any]] | None] = msgspec.msgpack.Decoder(
    list[dict[str, Any]] | None
)
_options: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation. `messages`: None if the request has a prompt. `late_tools`: callable, but not for the
    template. `options`: chat template arguments."""

    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    late_tools: Sequence[Mapping[str, Any]] = ()


def pack(value: object) -> Raw:
    """Pack a part of a request. Raises `RequestError(invalid_request)` if it cannot be encoded."""
    try:
        return Raw(_encoder.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"The request cannot be encoded: {error}."
        raise RequestError(Code.INVALID_REQUEST, message) from None


def unpack(request: Generate) -> Conversation:
    """Unpack the conversation of `request`. Raises `RequestError(invalid_request)` if it is malformed."""
    try:
        return Conversation(
            messages=None if request.messages is UNSET else _messages.decode(request.messages),
            tools=None if request.tools is UNSET else _messages.decode(request.tools),
            options={} if request.template_kwargs is UNSET else _options.decode(request.template_kwargs),
            late_tools=() if request.late_tools is UNSET else _messages.decode(request.late_tools) or (),
        )
    # Garbage inside a string surfaces as UnicodeDecodeError, deep nesting as RecursionError.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"The conversation is malformed: {error}."
        raise RequestError(Code.INVALID_REQUEST, message, param="messages") from None


def ends_with_prefill(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the model could continue the last message: assistant text without tool calls."""
    last: Mapping[str, Any] = messages[-1] if messages else {}
    is_text = isinstance(last.get("content"), str) and bool(last["content"])
    return last.get("role") == "assistant" and is_text and not last.get("tool_calls")


def packed_bytes(request: Generate) -> int:
    """Return the size of the packed messages and tools in bytes, without the options."""
    parts = (request.messages, request.tools, request.late_tools)
    return sum(memoryview(part).nbytes for part in parts if part is not UNSET)
