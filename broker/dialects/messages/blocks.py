"""The channels of an answer -> content blocks, one after the other: the events that streams and documents
share.

A block ends where another channel goes on. White space by itself makes no block: it is held back until more
of its channel comes, and left out where something else does, since Anthropic's API would not take it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from protocol.parts import CallDelta, Delta

SIGNED = "rh1_"


class Kind(StrEnum):
    """Of a block, or of what it gains."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL_USE = "tool_use"
    SIGNATURE = "signature"


class Opened(NamedTuple):
    """A block begins. `id` and `name` are those of a call."""

    kind: Kind
    id: str = ""
    name: str = ""


class Grown(NamedTuple):
    """The block that is open gains text: of a call its arguments, of a thought, last, its signature."""

    kind: Kind
    text: str


class Closed(NamedTuple):
    """The block that is open is whole."""


Event = Opened | Grown | Closed


class Blocks:
    """Where one answer stands."""

    def __init__(self) -> None:
        self._open: Kind | None = None
        self._held = Grown(Kind.TEXT, "")
        self._call = -1
        self._thought = sha256()

    def take(self, delta: Delta) -> Iterator[Event]:
        """What a step has brought."""
        if delta.reasoning:
            yield from self._say(Kind.THINKING, delta.reasoning)
        if delta.text:
            yield from self._say(Kind.TEXT, delta.text)
        for call in delta.calls:
            yield from self._grow_call(call)

    def close(self) -> Iterator[Event]:
        """Nothing more of the block that is open, if one is."""
        self._held = Grown(Kind.TEXT, "")
        if self._open is Kind.THINKING:
            yield Grown(Kind.SIGNATURE, SIGNED + self._thought.hexdigest())
            self._thought = sha256()
        if self._open is not None:
            self._open = None
            yield Closed()

    def _say(self, kind: Kind, text: str) -> Iterator[Event]:
        if self._open is not kind:
            text = self._held.text + text if self._held.kind is kind else text
            if text.isspace():
                self._held = Grown(kind, text)
                return
            yield from self._begin(Opened(kind))
        if kind is Kind.THINKING:
            self._thought.update(text.encode())
        yield Grown(kind, text)

    def _grow_call(self, call: CallDelta) -> Iterator[Event]:
        if call.index > self._call:
            self._call = call.index
            yield from self._begin(Opened(Kind.TOOL_USE, call.id, call.name))
        if call.arguments:
            yield Grown(Kind.TOOL_USE, call.arguments)

    def _begin(self, opened: Opened) -> Iterator[Event]:
        yield from self.close()
        self._open = opened.kind
        yield opened
