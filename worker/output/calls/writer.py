"""Output side of tool-call parsing: streams the calls of one answer as deltas. Emitted text is final, and no
call is completed that the model has not completed."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Callable, Mapping

from protocol.types import CallDelta
from worker.output.calls.literals import quote
from worker.output.calls.schemas import Schema
from worker.output.calls.source import BrokenError, CallSource, Steps
from worker.output.channels import CALL, CALLED, Piece
from worker.values import EngineRequest

ID_DIGITS = 24


class CallNumbering:
    """Numbered calls of one answer, with their pending deltas."""

    def __init__(
        self,
        tools: Mapping[str, Schema],
        identify: Callable[[int], str],
        *,
        single: bool,
        only: bool = False,
    ) -> None:
        """`identify`: returns the id of a call by its number. `single`: at most one call is allowed. `only`:
        the answer has no other content."""
        self.tools = tools
        self.only = only
        self.whole = 0
        self.begun = 0
        self._identify = identify
        self._single = single
        self._ids: set[str] = set()
        self._pieces: list[Piece] = []
        self._said: list[str] = []
        self._head = ("", "")

    @property
    def is_complete(self) -> bool:
        """Whether the only allowed call is complete."""
        return self._single and self.whole > 0

    def begin(self, name: str, own_id: str = "") -> None:
        """Begin a call. `own_id`: the model's id for it, if any. Raises `BrokenError` for an unknown tool."""
        if name not in self.tools or self.is_complete:
            raise BrokenError
        self._settle(CALL)
        id = self._identify(self.begun) if own_id in self._ids | {""} else own_id
        self._ids.add(id)
        self._head = (id, name)
        self.begun += 1

    def say(self, arguments: str) -> None:
        """Append JSON to the arguments of the current call."""
        self._said.append(arguments)

    def close(self) -> None:
        """Complete the current call."""
        self._settle(CALLED)
        self.whole += 1

    def drain(self) -> list[Piece]:
        """Return and clear the pending pieces."""
        self._settle(CALL)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _settle(self, state: str) -> None:
        id, name = self._head
        if name or self._said:
            delta = CallDelta(index=self.begun - 1, id=id, name=name, arguments="".join(self._said))
            self._pieces.append((state, delta))
            self._head = ("", "")
            self._said.clear()


class CallWriter:
    """Interface of readers: the text behind one marker, and the calls parsed from it.

    Emitting output marks the text read for it as taken.
    """

    def __init__(self, source: CallSource, calls: CallNumbering) -> None:
        self.source = source
        self.name = ""
        """Name of the tool of the current call."""
        self.is_open = False
        """Whether a call is emitted and not complete."""
        self.is_named = False
        """Whether a tool has been named, also if its call is not emitted yet."""
        self._calls = calls
        self._begun_before = calls.begun
        self.keys: list[str] = []
        """The arguments of the current call that were begun with `key`."""
        self._said: list[str] = []

    @property
    def has_begun(self) -> bool:
        """Whether a call has been emitted."""
        return self._calls.begun > self._begun_before

    @property
    def arguments(self) -> str:
        """The arguments of the current call so far."""
        return "".join(self._said)

    @property
    def schema(self) -> Schema:
        """Schema of the current call's arguments."""
        return self._calls.tools[self.name]

    def has_parameter(self, name: str) -> bool:
        """Whether a tool is named `name`."""
        return name in self._calls.tools

    def may_know(self, text: str) -> bool:
        """Whether the name of a tool begins with `text`."""
        return any(name.startswith(text) for name in self._calls.tools)

    def begin(self, name: str, own_id: str = "") -> None:
        """Begin a call of the tool `name`. Raises `BrokenError` for an unknown tool."""
        self._calls.begin(name, own_id)
        self.name = name
        self.is_open = self.is_named = True
        self.keys = []
        self._said = []
        self.source.take()

    def say(self, arguments: str, *, but: int = 0) -> None:
        """Append JSON to the arguments. `but`: number of read characters that are not part of it."""
        self._calls.say(arguments)
        self._said.append(arguments)
        self.source.take(but=but)

    def key(self, name: str) -> None:
        """Begin the argument `name`; its value follows."""
        self.say((", " if self.keys else "{") + quote(name) + ": ")
        self.keys.append(name)

    def close_keys(self) -> None:
        """Complete a call whose arguments were written one by one with `key`."""
        self.close("}" if self.keys else "{}")

    def close(self, last: str = "}") -> None:
        """Complete the call with `last`, the end of its arguments."""
        self.say(last)
        self.is_open = False
        self._calls.close()


Reader = Callable[[CallWriter], Steps[None]]
"""Reads all calls behind a marker."""


def namer_of(engine_request: EngineRequest) -> Callable[[int], str]:
    """Return a function from a call's number to its id, which depends on the seed and the prompt only.

    The request's id is not used: a request that continues on another worker has a different one there.
    """
    tokens = engine_request.tokens

    @functools.cache
    def asked() -> bytes:
        return hashlib.sha256(array("q", [engine_request.sampling.seed, *tokens]).tobytes()).digest()

    return lambda index: "call_" + hashlib.sha256(asked() + index.to_bytes(4, "big")).hexdigest()[:ID_DIGITS]
