"""Output processor of one request: splits tokens into the channels reasoning, content and tool calls.

Models separate channels by markers. Invariants: each channel, joined, is its part of the answer's text
without markers, the content up to the first stop string. No marker is emitted, not even in part, unless it
stays incomplete. The output depends on the tokens alone, so an answer continues alike on another worker.

Some markers are or contain special tokens, which have no text for clients. These appear in the text as
*signs*: lone surrogates, which no decoder produces. A sign that belongs to no marker is dropped. Other tokens
that markers require as tokens get signs too; outside a marker such a sign turns back into the token's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from protocol.types import CallDelta
from worker.output.text import StopMatcher, TextStream, Vocabulary
from worker.values import OutputDelta

T = TypeVar("T")
REASONING = "reasoning"
"""State of a format in which the model reasons, by upstream's name. Text in all other states is content."""
CONTENT = "normal"
CALL = "tool"
"""State of a tool call."""
CALLED = "called"
"""State of the piece that completes a call."""

Piece = tuple[str, str | CallDelta]
"""A state with certain text, without markers, or with the delta of a call."""

Edges = Mapping[str, Iterable[tuple[str, str]]]
"""For each state, the markers that end it, each with the state that it begins."""

SIGNS_MAX = 2048
_SIGN_FIRST = 0xD800
_SIGNS = re.compile("[\ud800-\udfff]")


def signs_of(tokens: Iterable[int]) -> dict[int, str]:
    """Assign a sign to each token. Raises `ValueError` if there are more than `SIGNS_MAX` tokens."""
    distinct = sorted({*tokens})
    if len(distinct) > SIGNS_MAX:
        raise ValueError(f"{len(distinct)} special tokens in markers, at most {SIGNS_MAX} are supported")
    return {token: chr(_SIGN_FIRST + place) for place, token in enumerate(distinct)}


def signed(marker: str, names: Mapping[str, str]) -> str:
    """Return a marker with signs in place of the names of special tokens. `names`: signs by name."""
    for name in sorted(names, key=len, reverse=True):
        marker = marker.replace(name, names[name])
    return marker


class Markers(NamedTuple):
    """Signs of tokens, and the texts of signs whose tokens have text."""

    of: Mapping[int, str]
    texts: Mapping[str, str] = {}


class Literals(Generic[T]):
    """Search for several literals in text that arrives in pieces."""

    def __init__(self, values: Mapping[str, T]) -> None:
        """`values`: by literal."""
        self.values = values
        self.pattern = re.compile("|".join(map(re.escape, values)) or "(?!)")
        self._held_max = max(map(len, values), default=1) - 1
        self._begins = re.compile("|".join({re.escape(literal[0]) for literal in values}) or "(?!)")

    def first(self, text: str) -> tuple[int, int, T] | None:
        """Return start, end and value of the literal that is completed first."""
        if self.pattern.search(text) is None:
            return None
        found = (
            (at + len(literal), at, literal) for literal in self.values if (at := text.find(literal)) >= 0
        )
        end, start, literal = min(found)
        return start, end, self.values[literal]

    def hold(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a literal."""
        found = self._begins.search(text, max(0, len(text) - self._held_max))
        while found:
            rest = text[found.start() :]
            if any(literal.startswith(rest) for literal in self.values):
                return len(rest)
            found = self._begins.search(text, found.end())
        return 0


class Transitions:
    """State machine of a model's markers. Immutable and shared by the scanners of its answers."""

    def __init__(self, edges: Edges, names: Mapping[str, str]) -> None:
        """`names`: signs by the names of their tokens. A marker counts as signs and as plain text."""
        self._of = {
            state: Literals(
                {form: then for marker, then in leaving for form in (marker, signed(marker, names))}
            )
            for state, leaving in edges.items()
        }
        self.markers = frozenset(form for literals in self._of.values() for form in literals.values)
        self.states = self._of.keys()

    def of(self, state: str) -> Literals[str]:
        """Return the markers that end a state, with the state that each begins."""
        return self._of.get(state) or Literals({})


class TransitionScanner:
    """Scanner of one answer's text for markers, from state to state."""

    def __init__(self, transitions: Transitions, state: str) -> None:
        self.state = state
        self.held = ""
        """Text that may become a marker."""
        self._transitions = transitions
        self._literals = transitions.of(state)

    def enter(self, state: str) -> None:
        """Continue from `state`, with no text withheld."""
        self.state, self.held, self._literals = state, "", self._transitions.of(state)

    def scan(self, text: str) -> tuple[str, str | None]:
        """Scan up to the first marker. Return the certain text before it, and the text behind it; None: there
        is no marker yet."""
        text = self.held + text
        if found := self._literals.first(text):
            start, end, state = found
            self.enter(state)
            return text[:start], text[end:]
        certain = len(text) - self._literals.hold(text)
        self.held = text[certain:]
        return text[:certain], None


class ChannelStateMachine(Protocol):
    """Parser state of one answer in its model's output format."""

    state: str

    def split(self, text: str) -> Sequence[Piece]:
        """Parse more text; return the pieces that are certain."""

    def rest(self, *, has_ended: bool = False) -> Sequence[Piece]:
        """Return the withheld text. Call once. `has_ended`: the model has ended the answer by itself."""


class ChannelProcessor:
    """`OutputProcessor` of a model whose answers have channels."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        machine: ChannelStateMachine,
        signs: Markers,
        stop: Sequence[str],
        *,
        single_call: bool = False,
    ) -> None:
        """`signs`: of the tokens in markers. `stop`: stop strings of the content. `single_call`: stop after
        the first complete call."""
        self.stopped = False
        self.reasoning_tokens = 0
        self.has_called = False
        self._vocabulary = vocabulary
        self._machine = machine
        self._signs = signs.of
        self._texts = signs.texts
        self._stream = TextStream(vocabulary)
        self._matcher = StopMatcher(stop)
        self._single_call = single_call
        # Tokens that began in reasoning and may belong to a call.
        self._undecided_tokens = 0

    @property
    def stop_string(self) -> str:
        return self._matcher.found

    def push(self, token: int) -> OutputDelta:
        if self.stopped:
            return OutputDelta()
        machine = self._machine
        was_thinking = machine.state == REASONING
        sign = self._signs.get(token)
        text = self._stream.push(token) if sign is None else self._stream.settle() + sign
        pieces = machine.split(text) if text else ()
        state = machine.state
        if state == CONTENT and not was_thinking:
            is_content = sign is None
        else:
            is_content = False
            self._count_thought(state, was_thinking)
        if len(pieces) == 1 and sign is None:  # as most are
            state, grown = pieces[0]
            return self._grown(state, grown, is_content)
        return self._sorted(pieces, is_content)

    def flush(self, *, has_ended: bool = False) -> OutputDelta:
        """Return the withheld output. A marker or a stop string may be found only here. Call once."""
        if self.stopped:
            return OutputDelta()
        pieces = [*self._machine.split(self._stream.rest()), *self._machine.rest(has_ended=has_ended)]
        growth = self._sorted(pieces, is_content=True)
        return growth if self.stopped else growth.then(OutputDelta(self._matcher.rest()))

    def spell(self, token: int) -> bytes:
        return self._vocabulary.spell(token)

    def _count_thought(self, state: str, was_thinking: bool) -> None:
        """Count reasoning tokens, including those of failed call attempts within reasoning."""
        if state == CALL:
            self._undecided_tokens += was_thinking or self._undecided_tokens > 0
            return
        if state == REASONING and (was_thinking or self._undecided_tokens):
            self.reasoning_tokens += 1 + self._undecided_tokens
        self._undecided_tokens = 0

    def _sorted(self, pieces: Iterable[Piece], is_content: bool) -> OutputDelta:
        growth = OutputDelta(is_content=is_content)
        for state, grown in pieces:
            if not self.stopped:
                growth = growth.then(self._grown(state, grown, is_content))
        return growth

    def _grown(self, state: str, grown: str | CallDelta, is_content: bool) -> OutputDelta:
        if not isinstance(grown, str):
            return self._called(state, grown)
        if self._signs and not grown.isascii():
            grown = _SIGNS.sub(self._text_of, grown)
        if state == REASONING:
            return OutputDelta("", grown, is_content)
        certain = self._matcher.push(grown)
        self.stopped = self._matcher.matched
        return OutputDelta(certain, "", is_content)

    def _called(self, state: str, grown: CallDelta) -> OutputDelta:
        self._undecided_tokens = 0
        if not grown.arguments.isascii():
            arguments = _SIGNS.sub(self._text_of, grown.arguments)
            grown = replace(grown, arguments=arguments)
        if state == CALLED:
            self.has_called = True
            self.stopped = self._single_call
        return OutputDelta(self._matcher.rest() if self.stopped else "", "", False, (grown,))

    def _text_of(self, sign: re.Match[str]) -> str:
        """Return the text that clients see for a sign outside markers."""
        return self._texts.get(sign[0], "")
