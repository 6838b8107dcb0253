"""Calls that broke off: clients must not take them for calls, and run a tool with a part of its arguments.

A call that `max_tokens` has cut is in the answer with the part that it has, and the finish reason says so, as
in OpenAI's and Anthropic's APIs. Any other that broke off is text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from broker.dialects.json_size import is_too_deep

_object: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_whole(arguments: str) -> bool:
    """Return whether a call's arguments are a JSON object. They are not if the call broke off."""
    return fields_of(arguments) is not None


def fields_of(arguments: str) -> dict[str, msgspec.Raw] | None:
    """Return a call's arguments by name; None if they are no JSON object."""
    if is_too_deep(arguments.encode(errors="replace")):
        return None
    try:
        return _object.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def as_text(name: str, arguments: str) -> str:
    """Return a call that broke off as the text that clients get instead."""
    quoted: Any = msgspec.json.encode(name).decode()
    return f'{{"name": {quoted}, "arguments": {arguments}'
