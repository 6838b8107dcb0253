"""What of a request only its worker reads, packed when the request is made.

A parsed conversation takes up to thirty times the bytes of its text: every small message is a dict of its
own. Packed it takes what it takes on the wire, and it is kept for as long as its client stays, since it may
have to be sent again. It goes into the message as it is: nobody can tell on the wire when it was packed.
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
"""An option that no template sees: where the prompt of a conversation ends, if not where the model's turn has
been opened."""
IN_MESSAGE, BEFORE_TURN = "in_message", "before_turn"
"""Its values: within the last message, with which the model goes on; where its turn is still to begin."""

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[list[dict[str, Any]] | None] = msgspec.msgpack.Decoder(
    list[dict[str, Any]] | None
)
_options: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages`: None where the request has a prompt instead. `options`: arguments for the chat template."""

    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def pack(value: object) -> Raw:
    """A part of a request. Raises `RequestError(invalid_request)` for what the wire does not carry."""
    try:
        return Raw(_encoder.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"The request cannot be passed on: cannot encode: {error}."
        raise RequestError(Code.INVALID_REQUEST, message) from None


def unpack(request: Generate) -> Conversation:
    """Raises `RequestError(invalid_request)` for what is no conversation."""
    try:
        return Conversation(
            messages=None if request.messages is UNSET else _messages.decode(request.messages),
            tools=None if request.tools is UNSET else _messages.decode(request.tools),
            options={} if request.template_kwargs is UNSET else _options.decode(request.template_kwargs),
        )
    # Garbage inside a string surfaces as UnicodeDecodeError, deep nesting as RecursionError.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"The conversation cannot be read: {error}."
        raise RequestError(Code.INVALID_REQUEST, message, param="messages") from None


def is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """The last message is one that the model could go on with: text of the assistant's own, and no calls."""
    last: Mapping[str, Any] = messages[-1] if messages else {}
    is_text = isinstance(last.get("content"), str) and bool(last["content"])
    return last.get("role") == "assistant" and is_text and not last.get("tool_calls")


def packed_bytes(request: Generate) -> int:
    """How long what was packed is, but for the options."""
    return sum(memoryview(part).nbytes for part in (request.messages, request.tools) if part is not UNSET)
