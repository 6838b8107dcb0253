"""Lower bound of a prompt's tokens by its bytes, to refuse what cannot fit before it is sent. Pure.

A worker reports the most bytes, apart from white space, that one token of its tokenizer can stand for. Only
text counts that is certain to be in the prompt: a raw prompt, or the last message if it is the user's. A chat
template may drop earlier messages, and may strip white space.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from protocol.conversation import packed_bytes
from protocol.errors import too_long
from protocol.messages import Generate, Ready, Request

_split: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(list[Raw])
_read: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_WHITE_SPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
_WHITE_SPACE += "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"


def check_prompt(request: Request, ready: Ready) -> None:
    """Raise `RequestError(context_length_exceeded)` if a prompt certainly exceeds the worker's context."""
    if not isinstance(request, Generate) or request.tokenizing is not None or request.tokens is not None:
        return
    bytes_max = ready.token_bytes_max * ready.context_length
    size = packed_bytes(request) + 4 * len(request.prompt or "")
    if not bytes_max or size <= bytes_max:
        return
    tokens = sum(map(_solid_bytes, _certain_texts(request))) // ready.token_bytes_max
    if tokens > ready.context_length:
        source = request.source or ("prompt" if request.messages is UNSET else "messages")
        raise too_long(ready.context_length, tokens, source, by_memory=False, is_partial=True)


def _certain_texts(request: Generate) -> Iterator[str]:
    """Yield the texts that are in the prompt whatever the chat template. Malformed ones are the worker's to
    refuse."""
    if request.messages is UNSET:
        yield request.prompt or ""
        return
    try:
        messages = _split.decode(request.messages)
        last = _read.decode(messages[-1]) if messages else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return
    if not isinstance(last, dict) or last.get("role") != "user":
        return
    content = last.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            yield text


def _solid_bytes(text: str) -> int:
    """Return the number of bytes of a text without white space."""
    blank_bytes = sum(text.count(blank) * len(blank.encode()) for blank in _WHITE_SPACE)
    return len(text.encode(errors="replace")) - blank_bytes
