"""Content blocks from the channels of an answer: the events that streams and documents share.

A block ends when another channel continues. Whitespace alone makes no block: it is held back until its
channel continues, and dropped if another does, since Anthropic's API would refuse it in a later request.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from broker.dialects.calls import is_whole
from protocol.types import CallDelta, Delta

SIGNED = "rh1_"


class BlockKind(StrEnum):
    """Kind of a block or of a delta."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL_USE = "tool_use"
    SIGNATURE = "signature"


class BlockStart(NamedTuple):
    """Start of a block. `id` and `name` are set for tool calls."""

    kind: BlockKind
    id: str = ""
    name: str = ""


class BlockDelta(NamedTuple):
    """Text for the open block: also a call's arguments, or the signature that ends a thinking block."""

    kind: BlockKind
    text: str


class BlockStop(NamedTuple):
    """End of the open block."""


Event = BlockStart | BlockDelta | BlockStop


class ContentBlocks:
    """Block state of one answer."""

    def __init__(self) -> None:
        self._open: BlockKind | None = None
        self._held = BlockDelta(BlockKind.TEXT, "")
        self._call = -1
        self._arguments: list[str] = []
        self._thought = sha256()
        self.is_broken = False
        """Whether a call broke off."""

    def take(self, delta: Delta) -> Iterator[Event]:
        """Return the events of one delta."""
        if delta.reasoning:
            yield from self._say(BlockKind.THINKING, delta.reasoning)
        if delta.text:
            yield from self._say(BlockKind.TEXT, delta.text)
        for call in delta.calls:
            yield from self._grow_call(call)

    def close(self) -> Iterator[Event]:
        """Close the open block, if any."""
        self._held = BlockDelta(BlockKind.TEXT, "")
        if self._open is BlockKind.THINKING:
            yield BlockDelta(BlockKind.SIGNATURE, SIGNED + self._thought.hexdigest())
            self._thought = sha256()
        if self._open is BlockKind.TOOL_USE:
            self.is_broken = self.is_broken or not is_whole("".join(self._arguments))
        if self._open is not None:
            self._open = None
            yield BlockStop()

    def _say(self, kind: BlockKind, text: str) -> Iterator[Event]:
        if self._open is not kind:
            text = self._held.text + text if self._held.kind is kind else text
            if text.isspace():
                self._held = BlockDelta(kind, text)
                return
            yield from self._begin(BlockStart(kind))
        if kind is BlockKind.THINKING:
            self._thought.update(text.encode())
        yield BlockDelta(kind, text)

    def _grow_call(self, call: CallDelta) -> Iterator[Event]:
        if call.index > self._call:
            self._call = call.index
            yield from self._begin(BlockStart(BlockKind.TOOL_USE, call.id, call.name))
            self._arguments = []
        if call.arguments:
            self._arguments.append(call.arguments)
            yield BlockDelta(BlockKind.TOOL_USE, call.arguments)

    def _begin(self, opened: BlockStart) -> Iterator[Event]:
        yield from self.close()
        self._open = opened.kind
        yield opened
