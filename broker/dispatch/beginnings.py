"""How a prompt begins, as far as the gateway can tell: by bytes, since tokens only workers know. Pure.

Two prompts that begin alike have the same *marks* up to where they part: one mark behind each message, and
one every `STRIDE_BYTES` within a long one. A mark stands for all that is before it: salt, tools, images and
text. That templates may put another order to it does not matter: a mark is a hint, never a promise.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from protocol.messages import Generate, Request

STRIDE_BYTES = 2048
"""About as many as the longest run has that a worker stores as one."""
HEAD_MARKS_MAX, TAIL_MARKS_MAX = 32, 96
"""Of a prompt: what many have in common is near its beginning, what it was one request ago near its end."""

_MARK_BYTES = 16
_IMAGE, _VIDEO = (msgspec.msgpack.encode({"type": kind}) for kind in ("image", "video"))
"""Their placeholders. No text can contain these bytes: they are no UTF-8."""

_split: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(list[Raw])
_read: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Of one prompt of `size` bytes: marks, each with the bytes before it, the shortest beginning first."""

    marks: tuple[tuple[bytes, int], ...] = ()
    size: int = 0


NONE = Beginnings()


def beginnings(request: Request) -> Beginnings:
    """`NONE` for what has no prompt that could be reused, or one that nobody can read."""
    if not isinstance(request, Generate) or request.tokenizing is not None:
        return NONE
    digest, size = hashlib.blake2b(_head(request), digest_size=_MARK_BYTES), 0
    marks: list[tuple[bytes, int]] = []
    try:
        for piece in _pieces(request):
            digest.update(piece)
            size += len(piece)
            marks.append((digest.digest(), size))
    # Garbage surfaces as UnicodeDecodeError too; a worker will say what is wrong with it.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return NONE
    if len(marks) > HEAD_MARKS_MAX + TAIL_MARKS_MAX:
        marks = marks[:HEAD_MARKS_MAX] + marks[-TAIL_MARKS_MAX:]
    return Beginnings(tuple(marks), size)


def _head(request: Generate) -> bytes:
    """What is before all messages, or keeps equal prompts apart."""
    tools = b"" if request.tools is UNSET else bytes(request.tools)
    return b"%d\0%s\0%s" % (len(request.cache_salt), request.cache_salt.encode(errors="replace"), tools)


def _pieces(request: Generate) -> Iterator[bytes]:
    if request.tokens is not None:
        return _strides(array("q", request.tokens).tobytes())
    if request.messages is UNSET:
        return _strides((request.prompt or "").encode(errors="replace"))
    return _of_messages(request.messages, [media.sha256.encode() for media in request.media])


def _of_messages(packed: Raw, media: list[bytes]) -> Iterator[bytes]:
    for message in _split.decode(packed):
        raw = bytes(message)
        pieces = (
            [raw] if len(raw) <= STRIDE_BYTES else list(_strides(b"\0".join(_strings(_read.decode(raw)))))
        )
        shown = raw.count(_IMAGE) + raw.count(_VIDEO)
        yield from pieces[:-1]
        yield pieces[-1] + b"\0".join([b"", *media[:shown]])
        del media[:shown]


def _strides(text: bytes) -> Iterator[bytes]:
    for first in range(0, len(text), STRIDE_BYTES):
        yield text[first : first + STRIDE_BYTES]


def _strings(value: Any) -> Iterator[bytes]:
    """A long message without the lengths that stand before its parts: those differ from its first byte on."""
    match value:
        case str():
            yield value.encode(errors="replace")
        case dict():
            for key, part in value.items():
                yield str(key).encode(errors="replace")
                yield from _strings(part)
        case list():
            for part in value:
                yield from _strings(part)
        case _:
            yield repr(value).encode()
