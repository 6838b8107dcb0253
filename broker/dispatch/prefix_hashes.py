"""Prefix hashes of a prompt, over bytes because only workers know its tokens. Pure.

Two prompts have the same hashes (*marks*) up to where they diverge: one after each message, and one every
`STRIDE_BYTES` within a long message. Each hash covers everything before it: cache salt, adapter, tools,
images and text. A chat template may order these differently, which is harmless: a hash is only a hint.
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
"""About the size in bytes of the longest segment that a worker stores as one."""
HEAD_HASHES_MAX, TAIL_HASHES_MAX = 32, 96
"""Hashes per prompt: common prefixes end near its start, the conversation's previous prompt near its end."""

_MARK_BYTES = 16
_IMAGE, _VIDEO = (msgspec.msgpack.encode({"type": kind}) for kind in ("image", "video"))
"""Placeholders of media. No text contains these bytes: they are not valid UTF-8."""

_split: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(list[Raw])
_read: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """Hashes of a prompt of `size` bytes, each with the length of its prefix in bytes, shortest first."""

    hashes: tuple[tuple[bytes, int], ...] = ()
    size: int = 0


NONE = PrefixHashes()


def prefix_hashes(request: Request) -> PrefixHashes:
    """Return the prefix hashes; `NONE` if there is no reusable prompt, or it cannot be decoded."""
    if not isinstance(request, Generate) or request.tokenizing is not None:
        return NONE
    digest, size = hashlib.blake2b(_head(request), digest_size=_MARK_BYTES), 0
    hashes: list[tuple[bytes, int]] = []
    try:
        for piece in _pieces(request):
            digest.update(piece)
            size += len(piece)
            hashes.append((digest.digest(), size))
    # Invalid data may also raise UnicodeDecodeError; the worker will report the error.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return NONE
    if len(hashes) > HEAD_HASHES_MAX + TAIL_HASHES_MAX:
        hashes = hashes[:HEAD_HASHES_MAX] + hashes[-TAIL_HASHES_MAX:]
    return PrefixHashes(tuple(hashes), size)


def _head(request: Generate) -> bytes:
    """Return the bytes hashed before all messages: cache salt, adapter and tools."""
    tools = b"" if request.tools is UNSET else bytes(request.tools)
    salt = request.cache_salt.encode(errors="replace")
    return b"%d\0%s\0%s\0%s" % (
        len(request.cache_salt),
        salt,
        request.adapter.encode(errors="replace"),
        tools,
    )


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
    """Yield the strings of a message, without length prefixes: those would differ from the first byte."""
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
