"""How a model marks its thoughts and calls: by what upstream knows of its tokenizer, and its state machine.

Ours beside upstream's `make_text_state_machine`: a marker that stands where it has no business, the end of a
thought in the content for one, is taken out too, for no marker may reach a client. What is held back is no
more than may become a marker, where upstream holds a long run of `<` whole. Nothing held is lost when an
answer ends by itself, where upstream drops it. Heads, which only say whom the next words are for, are dropped
with their markers.

Where tools are offered, calls are looked for in all formats that are known, whichever the model's own is; in
a thought, in the model's own only, and only where the marker is not spelled out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from worker.models.template import Render, behind_thoughts
from worker.output.calls.formats import LITERALS, READERS, Reader
from worker.output.calls.reading import CallReading, Opening
from worker.output.calls.source import Spelling
from worker.output.calls.writer import Calls
from worker.output.channels import CALL, CONTENT, REASONING, Piece, Signs, signs_of
from worker.output.text import Vocabulary

Edges = dict[str, list[tuple[str, str]]]
"""By state, the markers that may stand there, and the states they lead to."""
_SAID = frozenset([CONTENT, REASONING])


class Format:
    """One for each model, for answers without tools. Without markers it is of no use: see `is_plain`."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: Vocabulary) -> None:
        edges = _edges_of(tokenizer)
        self.is_plain = not edges
        self.signs = Signs(signs_of(_special_tokens(tokenizer, vocabulary, _markers_in(edges))))
        self._machine = TextStateMachine(_spelled(edges, _names(vocabulary, self.signs)))
        self._lengths = _Lengths(edges)

    def open(self, state: str) -> Reading:
        """For an answer that begins in this state."""
        return Reading(self._machine, state, self._lengths)


class CallFormat:
    """The same for answers that may call tools."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: Vocabulary) -> None:
        edges = _edges_of(tokenizer)
        edges.setdefault(CONTENT, [])
        literals = _markers_in(edges) | LITERALS
        special = _special_tokens(tokenizer, vocabulary, literals)
        calling = calling_of(tokenizer)
        own = frozenset(() if calling is None else (calling,)) - special
        signs = signs_of(special | own)
        self.signs = Signs(signs, {signs[token]: vocabulary.spell(token).decode() for token in own})
        names = _names(vocabulary, self.signs)
        spelled = _spelled(edges, names)
        self._openings = _add_openings(spelled, tokenizer, names)
        self._spelling = Spelling(names)
        self._machine = TextStateMachine(spelled)
        self._lengths = _Lengths(spelled, calls=self._openings)

    def open(self, state: str, calls: Calls) -> CallReading:
        """For an answer that begins in this state."""
        reading = Reading(self._machine, state, self._lengths)
        return CallReading(reading, self._openings, self._spelling, calls)


def opening_of(tokenizer: TokenizerWrapper, prompt: str, bare: Callable[[], str]) -> str:
    """The state in which the answer to a rendered conversation begins.

    `bare` renders it without the opening of the model's turn. Upstream takes any thought that the prompt
    leaves open for the model's own; here a user may speak of `<think>` without one being begun.
    """
    if tokenizer.response_initial_state is not None:
        return str(tokenizer.response_initial_state)
    start, end = tokenizer.think_start, tokenizer.think_end
    if start is None or prompt.rfind(start) <= prompt.rfind(end):
        return CONTENT
    turn = prompt.removeprefix(bare())
    is_open = prompt.rstrip().endswith(start) or turn.rfind(start) > turn.rfind(end)
    return REASONING if is_open else CONTENT


def closing_of(tokenizer: TokenizerWrapper, template: Render | None) -> tuple[int, ...]:
    """The tokens that close a thought from outside: its end, and what the template has behind it. None where
    the end is several tokens: whether it has begun already could not be told in time."""
    end: Sequence[int] = tokenizer.think_end_tokens or ()
    if template is None or len(end) != 1:
        return ()
    behind = behind_thoughts(template, tokenizer.think_end)
    return (*end, *(tokenizer.encode(behind, add_special_tokens=False) if behind else ()))


class _Lengths:
    """What of a format its readings need beside its machine."""

    def __init__(self, edges: Edges, calls: Iterable[str] = ()) -> None:
        self.held_max = max((len(marker) for marker in _markers_in(edges)), default=1) - 1
        self.heads = edges.keys() - _SAID - {*calls}


class Reading:
    """`channels.Machine` of an answer without tools, and `calls.reading.Seeker` of one with them."""

    def __init__(self, machine: Any, state: str, lengths: _Lengths) -> None:
        self.state = state
        self._machine = machine
        # Upstream's (state, node, states, held text).
        self._position = machine.make_state(state)
        self._held_max = lengths.held_max
        self._heads = lengths.heads
        self._head = ""

    @property
    def holds(self) -> bool:
        """See `calls.reading.Seeker`."""
        return bool(self._position[3])

    def split(self, text: str) -> list[Piece]:
        """See `channels.Machine`."""
        pieces: list[Piece]
        position, pieces = TextStateMachine.split(self._position, text)
        if self._heads or len(position[3]) > self._held_max:
            return self._gone_on(position, pieces)
        self.state, self._position = position[0], position
        return pieces

    def seek(self, text: str) -> tuple[list[Piece], str]:
        """See `calls.reading.Seeker`."""
        position, pieces = TextStateMachine.split(self._position, text)
        if len(pieces) == 1:  # no marker, as mostly
            return self._gone_on(position, pieces), ""
        said: list[Piece] = []
        for count, character in enumerate(text, 1):
            position, pieces = TextStateMachine.split(self._position, character)
            said += self._gone_on(position, pieces)
            if len(pieces) > 1:
                return said, text[count:]
        raise AssertionError("a marker is met in the whole, and not in its characters")

    def enter(self, state: str) -> None:
        """See `calls.reading.Seeker`."""
        self.state = state
        self._position = self._machine.make_state(state)

    def rest(self) -> list[Piece]:
        """See `channels.Machine`. A head that leads nowhere is what was said."""
        self._position, held, _ = TextStateMachine.flush(self._position)
        return [(self.state, self._head + held)]

    def _gone_on(self, position: Any, pieces: list[Piece]) -> list[Piece]:
        self.state, node, states, held = position
        if len(held) > self._held_max:
            certain = len(held) - self._held_max
            pieces.append((self.state, held[:certain]))
            position = (self.state, node, states, held[certain:])
        self._position = position
        return self._without_heads(pieces) if self._heads else pieces

    def _without_heads(self, pieces: list[Piece]) -> list[Piece]:
        self._head += "".join(str(text) for state, text in pieces if state in self._heads)
        if self.state not in self._heads:
            self._head = ""
        return [piece for piece in pieces if piece[0] not in self._heads]


def _edges_of(tokenizer: TokenizerWrapper) -> Edges:
    edges: Edges = {}

    def add(states: Iterable[str], marker: str, then: str | None = None) -> None:
        for state in states:
            leaving = edges.setdefault(state, [])
            if marker not in [known for known, _ in leaving]:
                leaving.append((marker, then or state))
            edges.setdefault(then or state, [])

    for state, leaving in tokenizer.response_transitions.items():
        for marker, then in leaving:
            if then != CALL:
                add([state], marker, then)
    if tokenizer.has_thinking:
        add([CONTENT, REASONING], tokenizer.think_start, REASONING)
        add([CONTENT, REASONING], tokenizer.think_end, CONTENT)
    for marker in tokenizer.structural_markers:
        add([CONTENT, REASONING], marker)
    return edges


def _markers_in(edges: Edges) -> frozenset[str]:
    return frozenset(marker for leaving in edges.values() for marker, _ in leaving)


def _special_tokens(
    tokenizer: TokenizerWrapper, vocabulary: Vocabulary, literals: Iterable[str]
) -> frozenset[int]:
    """Those that these texts are made of."""
    tokens = (token for text in literals for token in tokenizer.encode(text, add_special_tokens=False))
    return vocabulary.special & {*tokens}


def calling_of(tokenizer: TokenizerWrapper) -> int | None:
    """What opens this model's own calls, in a thought too, if that is a single token."""
    tokens: Sequence[int] = tokenizer.tool_call_start_tokens or ()
    return tokens[0] if len(tokens) == 1 else None


def _names(vocabulary: Vocabulary, signs: Signs) -> dict[str, str]:
    return {vocabulary.spell(token).decode(): sign for token, sign in signs.of.items()}


def _spelled(edges: Edges, names: Mapping[str, str]) -> Edges:
    """With each marker as its tokens make it, and spelled out in plain ones, which upstream takes for a
    marker too."""
    return {
        state: [(form, then) for marker, then in leaving for form in sorted({marker, _signed(marker, names)})]
        for state, leaving in edges.items()
    }


def _add_openings(edges: Edges, tokenizer: TokenizerWrapper, names: Mapping[str, str]) -> dict[str, Opening]:
    """The markers of calls, each with a state of its own; by that state, what they open."""
    openings: dict[str, Opening] = {}

    def add(origin: str, form: str, reader: Reader) -> None:
        state = f"{CALL} {form}"
        openings[state] = Opening(form, reader)
        edges[origin].append((form, state))
        edges[state] = []

    for marker, reader in READERS.items():
        for form in sorted({marker, _signed(marker, names)}):
            add(CONTENT, form, reader)
    for origin, leaving in tokenizer.response_transitions.items():
        for marker in (marker for marker, then in leaving if then == CALL and marker in READERS):
            for form in sorted({marker, _signed(marker, names)}):
                add(origin, form, READERS[marker])
    own = tokenizer.tool_call_start
    if own in READERS and REASONING in edges and _signed(own, names) != own:
        add(REASONING, _signed(own, names), READERS[own])
    return openings


def _signed(marker: str, names: Mapping[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        marker = marker.replace(name, names[name])
    return marker
