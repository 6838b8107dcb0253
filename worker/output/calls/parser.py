"""Streaming tool-call parser: separates the calls in one answer from its text.

After each opening marker the text is parsed tentatively. Until a known tool is named, the attempt may fail:
then the marker is text, and parsing resumes behind it. Once a tool is named, emitted output stays, and text
resumes where the call ends or breaks. White space around calls belongs to them, so it is withheld until
something else follows.

If the answer is cut, what a call has not emitted is dropped. A call is all behind a complete marker, or
behind the name of a tool where there is no marker, until the attempt fails. A part of a marker is text, but
not directly behind a call, nor where nothing but calls was allowed.

Calls that models botch at their edges are repaired: repeated markers, closings that are missing or too many.
No value is ever completed or shortened: a call lacks nothing but its closing, or it stays unfinished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from worker.output.calls.formats import BARE, read_bare
from worker.output.calls.schemas import fits
from worker.output.calls.source import CLOSINGS, BrokenError, CallSource, Spelling, Steps
from worker.output.calls.writer import CallNumbering, CallWriter, Reader
from worker.output.channels import CALL, CONTENT, REASONING, Piece

_SPACES = " \t\r\n"

REPEATS_MAX = 8
"""Maximum number of repeated markers, or of closings in a row; more are text."""
_FENCES = ("```json", "```")
_BRACKETS = "}])"
_PAIRS = {"{": "}", "[": "]"}


class CallOpening(NamedTuple):
    """A marker that opens calls, as written in the text, and the reader of what follows."""

    marker: str
    reader: Reader


class MarkerScanner(Protocol):
    """Scanner for the next marker of the model's output format, apart from the calls themselves."""

    state: str

    @property
    def holds(self) -> bool:
        """Whether text is withheld that may become a marker."""

    def seek(self, text: str) -> tuple[list[Piece], str | None]:
        """Scan up to the first marker. Returns the certain pieces before it, and the text behind it; None:
        there is no marker yet."""

    def enter(self, state: str) -> None:
        """Continue from `state`, with no text withheld."""

    def rest(self, *, has_ended: bool = False) -> list[Piece]:
        """Return the text withheld as a possible marker. `has_ended`: see `ChannelStateMachine`."""


def is_plain(marker: str) -> bool:
    """Return whether a marker is made of text alone: the model may cite it. Signs are surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in marker)


def is_in_code(text: str) -> bool:
    """Return whether Markdown ends within code: a fence, or backticks in its last line."""
    fences = sum(line.lstrip().startswith("```") for line in text.split("\n"))
    return fences % 2 == 1 or text.rpartition("\n")[2].count("`") % 2 == 1


class CallAttempt:
    """A tentative parse of the text behind one marker."""

    def __init__(self, opening: CallOpening, spelling: Spelling, calls: CallNumbering, origin: str) -> None:
        """`origin`: the state in which the marker was found."""
        self.opening = opening
        self.origin = origin
        self.is_over = False
        self._source = CallSource(spelling)
        self._writer = CallWriter(self._source, calls)
        self._steps = read_repaired(self._writer, opening.reader, opening.marker)

    @property
    def has_begun(self) -> bool:
        """Whether a call has been emitted."""
        return self._writer.has_begun

    @property
    def is_call(self) -> bool:
        """Whether the text is a call, unless the attempt fails yet."""
        return bool(self.opening.marker) or self._writer.is_named

    def feed(self, text: str) -> None:
        """Parse more text."""
        self._source.feed(text)
        self._go_on()

    def end(self, *, has_answer_ended: bool) -> None:
        """Mark the end of the text."""
        self._source.end(has_answer_ended=has_answer_ended)
        self._go_on()

    def left(self) -> str:
        """Return the text that belongs to no call, once the attempt is over."""
        return self._source.left()

    def _go_on(self) -> None:
        try:
            next(self._steps)
        except (StopIteration, BrokenError):
            self.is_over = True


class ToolCallParser:
    """`ChannelStateMachine` of an answer that may contain tool calls."""

    def __init__(
        self,
        seeker: MarkerScanner,
        openings: Mapping[str, CallOpening],
        spelling: Spelling,
        calls: CallNumbering,
    ) -> None:
        """`openings`: by the state of `seeker` that their marker leads to."""
        self.state = seeker.state
        self._seeker = seeker
        self._openings = openings
        self._spelling = spelling
        self._calls = calls
        self._attempt: CallAttempt | None = None
        self._pieces: list[Piece] = []
        self._content: list[str] = []
        # White space at the start of the content or since a call; None: other content has followed.
        self._spaces: str | None = ""
        self._may_be_bare = True

    def split(self, text: str) -> list[Piece]:
        while text and not self._calls.is_complete:
            text = self._look(text) if self._attempt is None else self._try(self._attempt, text)
        state = self._seeker.state
        is_around = state == CONTENT and self._calls.begun and self._spaces is not None
        self.state = CALL if self._attempt or is_around else state
        pieces, self._pieces = self._pieces, []
        return pieces

    def rest(self, *, has_ended: bool = False) -> list[Piece]:
        pieces: list[Piece] = []
        while self._attempt is not None:
            is_cut = not has_ended and (self._attempt.is_call or self._calls.only)
            self._attempt.end(has_answer_ended=has_ended)
            pieces += self._drop() if is_cut else self.split(self._conclude(self._attempt))
        if self._calls.is_complete or not (has_ended or self._may_be_text()):
            return pieces
        for state, text in self._seeker.rest(has_ended=has_ended):
            self._say(state, str(text))
        if self._spaces and not self._calls.begun:
            self._pieces.append((CONTENT, self._spaces))
        return pieces + self.split("")

    def _may_be_text(self) -> bool:
        """Return whether withheld text may be something else than the marker of a call."""
        is_around = self._calls.begun and self._spaces is not None
        return self._seeker.state == REASONING or not (self._calls.only or is_around)

    def _drop(self) -> list[Piece]:
        """Finish an attempt whose text is cut, and drop what it has not emitted."""
        self._attempt, self._spaces = None, ""
        self._seeker.enter(CONTENT)
        self._pieces += self._calls.drain()
        return self.split("")

    def _look(self, text: str) -> str:
        """Scan for the next marker; return the text behind it."""
        seeker = self._seeker
        if self._may_be_bare and seeker.state == CONTENT and not seeker.holds:
            behind = text.lstrip(_SPACES)
            if behind.startswith(BARE):
                self._say(CONTENT, text[: len(text) - len(behind)])
                self._open(CallOpening("", read_bare), CONTENT)
                return behind
        origin = seeker.state
        said, behind_marker = seeker.seek(text)
        for state, piece in said:
            self._say(state, str(piece))
        if opening := self._openings.get(seeker.state):
            if is_plain(opening.marker) and is_in_code("".join(self._content)):
                seeker.enter(origin)
                self._say(origin, opening.marker)
            else:
                self._open(opening, origin)
        return behind_marker or ""

    def _open(self, opening: CallOpening, origin: str) -> None:
        self._attempt = CallAttempt(opening, self._spelling, self._calls, origin)

    def _try(self, attempt: CallAttempt, text: str) -> str:
        """Parse text as calls; return the part that belongs to none."""
        attempt.feed(text)
        self._pieces += self._calls.drain()
        return self._conclude(attempt) if attempt.is_over else ""

    def _conclude(self, attempt: CallAttempt) -> str:
        """Finish an attempt that is over; return the text to continue with."""
        self._pieces += self._calls.drain()
        self._attempt = None
        if attempt.has_begun:
            self._seeker.enter(CONTENT)
            self._spaces = ""
            self._may_be_bare = not attempt.opening.marker
        else:
            # A header state that leads to calls has no text of its own: a failed attempt becomes content.
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
            if state == CONTENT:
                self._content.append(text)


def read_repaired(writer: CallWriter, reader: Reader, marker: str) -> Steps[None]:
    """Read all calls behind a marker. `marker`: empty for calls without one."""
    fence = (yield from _skip_repeats(writer.source, marker)) if marker else ()
    closings = (*CLOSINGS, *fence)
    try:
        yield from reader(writer)
    except BrokenError:
        yield from _complete(writer, closings)
    yield from _skip_closings(writer.source, closings)


def closing_of(arguments: str) -> str | None:
    """Return the brackets that complete unfinished JSON; None: it lacks more than these."""
    open_brackets: list[str] = []
    is_string = is_escaped = False
    for character in arguments:
        if is_string:
            is_string = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
        elif character == '"':
            is_string = True
        elif character in _PAIRS:
            open_brackets.append(_PAIRS[character])
        elif character in _PAIRS.values():
            open_brackets.pop()
    closing = "".join(reversed(open_brackets)) if arguments else "{}"
    try:
        json.loads(arguments + closing)
    except ValueError:
        return None
    return closing


def _skip_repeats(source: CallSource, marker: str) -> Steps[tuple[str, ...]]:
    """Skip repetitions of the marker, and a code fence around the calls. Returns the end of the fence."""
    fence: tuple[str, ...] = ()
    for _ in range(REPEATS_MAX):
        found = yield from source.find(marker, *_FENCES, ">", "]")
        if found not in (marker, *_FENCES, ">", "]"):
            break
        fence = ("```",) if found in _FENCES else fence
    return fence


def _complete(writer: CallWriter, closings: tuple[str, ...]) -> Steps[None]:
    """Complete a call that only lacks brackets, if another closing or the end of the answer follows.

    Raises `BrokenError` if it lacks more: an argument that its tool requires, too.
    """
    closing = closing_of(writer.arguments) if writer.is_open else None
    if closing is None or not fits(writer.schema, json.loads(writer.arguments + closing)):
        raise BrokenError
    source = writer.source
    source.rewind()
    yield from _skip_brackets(source)
    found = yield from source.find(*closings, scraps=(">",))
    is_over = not found and source.has_answer_ended and writer.arguments
    if not (found in closings or is_over):
        raise BrokenError
    writer.close(closing)


def _skip_closings(source: CallSource, closings: tuple[str, ...]) -> Steps[None]:
    """Skip closings behind the calls: what is left of brackets, then markers."""
    for _ in range(REPEATS_MAX):
        yield from _skip_brackets(source)
        if not (yield from source.skip(*closings)):
            return
        source.take()


def _skip_brackets(source: CallSource) -> Steps[None]:
    """Skip white space and some closing brackets."""
    yield from source.spaces()
    for _ in range(REPEATS_MAX):
        character = yield from source.peek()
        if not character or character not in _BRACKETS:
            return
        source.accept()
        yield from source.spaces()
