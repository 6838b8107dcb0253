"""Where one answer stands that may call tools: what of it is calls, and what stays what it was.

Whatever a marker opens is tried. Until a tool is named it may still turn out to be no call: then it is text
again, its marker included, and is read once more from behind that marker. Once a tool is named, what was
given out stays, and text begins again where the call ends or breaks. White space that only stands around
calls is part of them, so it is held back until something else follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from worker.output.calls.formats import Reader
from worker.output.calls.objects import read_bare_object
from worker.output.calls.source import BrokenError, Source, Spelling
from worker.output.calls.writer import Calls, CallWriter
from worker.output.channels import CALL, CONTENT, REASONING, Piece

_SPACES = " \t\r\n"


class Opening(NamedTuple):
    """A marker that opens calls, as it stood in the text, and what reads what follows."""

    marker: str
    reader: Reader


class Seeker(Protocol):
    """Where one answer stands in its model's format, calls left aside."""

    state: str

    @property
    def holds(self) -> bool:
        """Something is held back that may become a marker."""

    def seek(self, text: str) -> tuple[list[Piece], str]:
        """Go on, up to the first marker: what is certain until there, and the text behind the marker."""

    def enter(self, state: str) -> None:
        """Go on from this state. Nothing is held back."""

    def rest(self) -> list[Piece]:
        """What was held back as the possible beginning of a marker."""


class Attempt:
    """What may be calls, behind one marker."""

    def __init__(self, opening: Opening, spelling: Spelling, calls: Calls, origin: str) -> None:
        """`origin`: the state in which the marker stood."""
        self.opening = opening
        self.origin = origin
        self.is_over = False
        self._source = Source(spelling)
        self._writer = CallWriter(self._source, calls)
        self._steps = opening.reader(self._writer)

    @property
    def has_begun(self) -> bool:
        """A call was given out."""
        return self._writer.has_begun

    def feed(self, text: str) -> None:
        """More of it."""
        self._source.feed(text)
        self._go_on()

    def end(self) -> None:
        """There is no more."""
        self._source.end()
        self._go_on()

    def left(self) -> str:
        """Once it is over: the text that belongs to no call."""
        return self._source.left()

    def _go_on(self) -> None:
        try:
            next(self._steps)
        except (StopIteration, BrokenError):
            self.is_over = True


class CallReading:
    """`channels.Machine` of an answer that may call tools."""

    def __init__(
        self, seeker: Seeker, openings: Mapping[str, Opening], spelling: Spelling, calls: Calls
    ) -> None:
        """`openings`: by the states of the seeker that their markers lead to."""
        self.state = seeker.state
        self._seeker = seeker
        self._openings = openings
        self._spelling = spelling
        self._calls = calls
        self._attempt: Attempt | None = None
        self._pieces: list[Piece] = []
        # White space before anything was said, or since a call; None: something was said.
        self._spaces: str | None = ""
        self._may_be_bare = True

    def split(self, text: str) -> list[Piece]:
        """See `channels.Machine`."""
        while text and not self._calls.is_complete:
            text = self._look(text) if self._attempt is None else self._try(self._attempt, text)
        state = self._seeker.state
        is_around = state == CONTENT and self._calls.begun and self._spaces is not None
        self.state = CALL if self._attempt or is_around else state
        pieces, self._pieces = self._pieces, []
        return pieces

    def rest(self) -> list[Piece]:
        """See `channels.Machine`."""
        pieces: list[Piece] = []
        while self._attempt is not None:
            self._attempt.end()
            pieces += self.split(self._conclude(self._attempt))
        if self._calls.is_complete:
            return pieces
        for state, text in self._seeker.rest():
            self._say(state, str(text))
        if self._spaces and not self._calls.begun:
            self._pieces.append((CONTENT, self._spaces))
        return pieces + self.split("")

    def _look(self, text: str) -> str:
        """For the next marker; the text behind it."""
        seeker = self._seeker
        if self._may_be_bare and seeker.state == CONTENT and not seeker.holds:
            behind = text.lstrip(_SPACES)
            if behind.startswith("{"):
                self._say(CONTENT, text[: len(text) - len(behind)])
                self._open(Opening("", read_bare_object), CONTENT)
                return behind
        origin = seeker.state
        said, text = seeker.seek(text)
        for state, piece in said:
            self._say(state, str(piece))
        if seeker.state in self._openings:
            self._open(self._openings[seeker.state], origin)
        return text

    def _open(self, opening: Opening, origin: str) -> None:
        self._attempt = Attempt(opening, self._spelling, self._calls, origin)

    def _try(self, attempt: Attempt, text: str) -> str:
        """As calls; the text that belongs to none."""
        attempt.feed(text)
        self._pieces += self._calls.drain()
        return self._conclude(attempt) if attempt.is_over else ""

    def _conclude(self, attempt: Attempt) -> str:
        """What was tried and is over: the text to go on with."""
        self._pieces += self._calls.drain()
        self._attempt = None
        if attempt.has_begun:
            self._seeker.enter(CONTENT)
            self._spaces = ""
            self._may_be_bare = not attempt.opening.marker
        else:
            # Behind a head that leads to a call there is nothing but calls.
            origin = attempt.origin if attempt.origin == REASONING else CONTENT
            self._seeker.enter(origin)
            self._may_be_bare = self._may_be_bare and origin != CONTENT
            self._say(origin, attempt.opening.marker)
        return attempt.left()

    def _say(self, state: str, text: str) -> None:
        if state == CONTENT and self._spaces is not None:
            behind = text.lstrip(_SPACES)
            self._spaces += text[: len(text) - len(behind)]
            if not behind:
                return
            text = self._spaces + behind
            self._spaces, self._may_be_bare = None, False
        if text:
            self._pieces.append((state, text))
