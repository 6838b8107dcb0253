"""The calls of one answer, as they grow: what has been given out of them stays, and nothing is finished that
the model has not finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from protocol.parts import CallDelta
from worker.output.calls.literals import quote
from worker.output.calls.schemas import Schema
from worker.output.calls.source import BrokenError, Source
from worker.output.channels import CALL, CALLED, Piece


class Calls:
    """All of one answer, numbered."""

    def __init__(self, tools: Mapping[str, Schema], identify: Callable[[int], str], *, single: bool) -> None:
        """`identify`: a call's id by its number. `single`: there is one at most."""
        self.tools = tools
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
        """There is the one call that there may be."""
        return self._single and self.whole > 0

    def begin(self, name: str, own_id: str = "") -> None:
        """`own_id`: what the model calls it, if it does. Raises `BrokenError` for an unknown tool."""
        if name not in self.tools or self.is_complete:
            raise BrokenError
        self._settle(CALL)
        id = self._identify(self.begun) if own_id in self._ids | {""} else own_id
        self._ids.add(id)
        self._head = (id, name)
        self.begun += 1

    def say(self, arguments: str) -> None:
        """More of the arguments of the call that was begun last, as JSON."""
        self._said.append(arguments)

    def close(self) -> None:
        """The call is whole."""
        self._settle(CALLED)
        self.whole += 1

    def drain(self) -> list[Piece]:
        """What has been given out since."""
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
    """What readers need: the text behind one marker, and the calls that they make of it.

    Whatever is given out takes what has been read for it from the text.
    """

    def __init__(self, source: Source, calls: Calls) -> None:
        self.source = source
        self.name = ""
        """The call that is being made."""
        self._calls = calls
        self._begun_before = calls.begun
        self._has_arguments = False

    @property
    def has_begun(self) -> bool:
        """A call was given out."""
        return self._calls.begun > self._begun_before

    @property
    def schema(self) -> Schema:
        """Of the arguments of the call."""
        return self._calls.tools[self.name]

    def knows(self, name: str) -> bool:
        """Whether there is such a tool."""
        return name in self._calls.tools

    def may_know(self, text: str) -> bool:
        """Whether the name of a tool begins so."""
        return any(name.startswith(text) for name in self._calls.tools)

    def begin(self, name: str, own_id: str = "") -> None:
        """A call, by name. Raises `BrokenError` for an unknown tool."""
        self._calls.begin(name, own_id)
        self.name = name
        self._has_arguments = False
        self.source.take()

    def say(self, arguments: str, *, but: int = 0) -> None:
        """More JSON of its arguments. `but`: so many characters of what was read are not part of it."""
        self._calls.say(arguments)
        self.source.take(but=but)

    def key(self, name: str) -> None:
        """The value of this argument follows."""
        self.say(("{" if not self._has_arguments else ", ") + quote(name) + ": ")
        self._has_arguments = True

    def close_keys(self) -> None:
        """The call is whole, after all its arguments one by one."""
        self.close("}" if self._has_arguments else "{}")

    def close(self, last: str = "}") -> None:
        """The call is whole, with the last of its arguments."""
        self.say(last)
        self._calls.close()
