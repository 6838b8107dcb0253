"""Output format of a model: a state machine over its reasoning and tool-call markers, from its tokenizer.

Differences from upstream's `make_text_state_machine`:
* Misplaced markers (for example the end of reasoning within content) are removed too: clients must see none.
* Only text that may still become a marker is buffered; upstream buffers all of a long run of `<`.
* Buffered text is not lost when an answer ends; upstream drops it.
* Headers, which only name the recipient of the text that follows, are dropped with their markers.

If a request has tools, calls are recognized in all known formats. Within reasoning only the model's own
format is recognized, and only if its marker is made of special tokens.

Tags around the content of an answer, which some families write behind a thought, are removed if the chat
template has them: other models write such tags because they were asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from worker.input.prompts.boundaries import Messages
from worker.input.prompts.markup import (
    HARMONY_CALL,
    HARMONY_HEADS,
    PLAIN_THOUGHTS,
    harmony_opening,
    has_plain_thoughts,
    is_harmony,
    thoughts_of,
    transitions,
)
from worker.input.prompts.template import Render, Template, attempt, behind_thoughts, template_of
from worker.input.prompts.wants import ANSWER, CALLED, HIDDEN, THOUGHT, TOOL, TOOL_NAME, USER, Tools
from worker.interfaces import OutputProcessor
from worker.output.calls.formats import LITERALS, READERS, read_harmony
from worker.output.calls.parser import CallOpening, ToolCallParser, is_plain
from worker.output.calls.schemas import Schema
from worker.output.calls.source import Spelling
from worker.output.calls.writer import CallNumbering, Reader
from worker.output.channels import (
    CALL,
    CONTENT,
    REASONING,
    Markers,
    Piece,
    Transitions,
    TransitionScanner,
    signed,
    signs_of,
)
from worker.output.text import Vocabulary

Edges = dict[str, list[tuple[str, str]]]
"""For each state, the markers that may occur in it and the states they lead to."""

_KNOWN = (
    ("<answer>", "</answer>"),  # Hunyuan
    ("<response>", "</response>"),  # Granite 3.3, ERNIE
)

PROBED_TOOLS: dict[str, Schema] = {f"{TOOL_NAME}_0": {}}
Kind = Literal["tool_calls", "reasoning"]
Open = Callable[[str, bool], OutputProcessor]
"""Opens the processor of an answer that begins in a state; with the probe's tools, or without."""


class Format:
    """Output format of answers without tools, one per model. `is_plain`: there are no markers to parse."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: Vocabulary) -> None:
        edges = edges_of(tokenizer)
        self.signs = Markers(signs_of(_special_tokens(tokenizer, vocabulary, _markers_in(edges))))
        self._machine = _Machine(edges, tokenizer, _names(vocabulary, self.signs))
        self.is_plain = not edges

    def open(self, state: str) -> FormatReader:
        """Return a reader for one answer that begins in `state`."""
        return FormatReader(self._machine, state)


class CallFormat:
    """Output format of answers that may call tools, one per model."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: Vocabulary) -> None:
        edges = edges_of(tokenizer)
        edges.setdefault(CONTENT, [])
        literals = _markers_in(edges) | LITERALS
        special = _special_tokens(tokenizer, vocabulary, literals)
        calling = calling_of(tokenizer)
        own = frozenset(() if calling is None else (calling,)) - special
        signs = signs_of(special | own)
        self.signs = Markers(signs, {signs[token]: vocabulary.spell(token).decode() for token in own})
        names = _names(vocabulary, self.signs)
        self._openings = _add_openings(edges, tokenizer, names)
        self._spelling = Spelling(names)
        self._machine = _Machine(edges, tokenizer, names, self._openings)

    def open(self, state: str, calls: CallNumbering) -> ToolCallParser:
        """Return a parser for one answer that begins in `state`."""
        reading = FormatReader(self._machine, state)
        return ToolCallParser(reading, self._openings, self._spelling, calls)


def opening_of(tokenizer: TokenizerWrapper, prompt: str, render_without_turn: Callable[[], str]) -> str:
    """Return the state in which the answer to a rendered conversation begins.

    `render_without_turn`: renders it without the opening of the model's turn. Upstream takes any unclosed
    `<think>` of the prompt for the model's; here one in a user's message does not count.
    """
    if is_harmony(tokenizer):
        return harmony_opening(prompt)
    marks = [*thoughts_of(tokenizer)]
    is_off = any(prompt.rstrip().endswith(end) for _, end in marks)
    if tokenizer.response_initial_state is not None and not is_off:
        return str(tokenizer.response_initial_state)
    for start, end in marks:
        if prompt.rfind(start) <= prompt.rfind(end):
            continue
        turn = prompt.removeprefix(render_without_turn())
        if prompt.rstrip().endswith(start) or turn.rfind(start) > turn.rfind(end):
            return REASONING
    return CONTENT


def closing_of(tokenizer: TokenizerWrapper, template: Render | None) -> tuple[int, ...]:
    """Return the tokens that force the end of reasoning: the end token and what the template writes after it.

    Empty if the end is several tokens, because a partial one could not be recognized in time.
    """
    end: Sequence[int] = tokenizer.think_end_tokens or ()
    if template is None or len(end) != 1:
        return ()
    behind = behind_thoughts(template, tokenizer.think_end)
    return (*end, *(tokenizer.encode(behind, add_special_tokens=False) if behind else ()))


class _Machine:
    """State machine of a format, its header states, and whether it may begin with one of `PLAIN_THOUGHTS`."""

    def __init__(
        self,
        edges: Edges,
        tokenizer: TokenizerWrapper,
        names: Mapping[str, str],
        calls: Iterable[str] = (),
    ) -> None:
        self.transitions = Transitions(edges, names)
        self.begins_plainly = has_plain_thoughts(tokenizer)
        self.heads = edges.keys() - {CONTENT, REASONING, *calls}


class FormatReader(TransitionScanner):
    """`ChannelStateMachine` of an answer without tools, and `MarkerScanner` of an answer with tools."""

    def __init__(self, machine: _Machine, state: str) -> None:
        super().__init__(machine.transitions, state)
        self._markers = machine.transitions.markers
        self._heads = machine.heads
        self._head = ""
        self._may_lack_head = True
        self._may_begin = machine.begins_plainly and state == CONTENT
        self._begun = ""

    @property
    def holds(self) -> bool:
        return bool(self.held or self._begun)

    def split(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        more, rest = self.seek(text)
        while rest is not None:
            pieces += more
            more, rest = self._seek(rest)
        return pieces + more

    def seek(self, text: str) -> tuple[list[Piece], str | None]:
        return self._seek(self._behind_beginning(text) if self._may_begin else text)

    def _seek(self, text: str) -> tuple[list[Piece], str | None]:
        state = self.state
        said, rest = self.scan(text)
        self._may_lack_head = self._may_lack_head and rest is None
        if state in self._heads:
            self._head += said
        if self.state not in self._heads:
            self._head = ""
        return [] if state in self._heads else [(state, said)], rest

    def _behind_beginning(self, text: str) -> str:
        """Return the text to go on with. An answer that begins with a plain marker of reasoning begins in
        reasoning; what may become one is withheld."""
        self._begun += text
        bare = self._begun.lstrip()
        start = next((start for start, _ in PLAIN_THOUGHTS if bare.startswith(start)), None)
        if start is not None:
            self.enter(REASONING)
            return bare[len(start) :]
        if bare and any(start.startswith(bare) for start, _ in PLAIN_THOUGHTS):
            return ""
        text, self._begun = self._begun, ""
        self._may_begin = not bare
        return text

    def enter(self, state: str) -> None:
        self._may_begin, self._begun = False, ""
        super().enter(state)

    def rest(self, *, has_ended: bool = False) -> list[Piece]:
        """Return the buffered text. A header without a marker after it is ordinary text. If the answer was
        cut in it, it is text only if there was no marker before it either."""
        buffered, self.held = self.held, ""
        text = self._head + self._begun
        if has_ended:
            text += buffered
        elif self.state in self._heads and not self._may_lack_head:
            text = ""
        else:
            text += self._without_cut_marker(buffered)
        return [(self.state, text)]

    def _without_cut_marker(self, text: str) -> str:
        """Drop the beginning of a marker from a special token on. Plain text may be no marker."""
        for place, character in enumerate(text):
            if not is_plain(character) and any(marker.startswith(text[place:]) for marker in self._markers):
                return text[:place]
        return text


def edges_of(tokenizer: TokenizerWrapper) -> Edges:
    """Return the transitions of answers without tools, one list for each state."""
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
    tags = ((CONTENT, tag, CONTENT) for tag in answer_tags_of(tokenizer))
    for state, marker, then in (*transitions(tokenizer), *tags):
        add([state], marker, then)
    return edges


def _markers_in(edges: Edges) -> frozenset[str]:
    return frozenset(marker for leaving in edges.values() for marker, _ in leaving)


def _special_tokens(
    tokenizer: TokenizerWrapper, vocabulary: Vocabulary, literals: Iterable[str]
) -> frozenset[int]:
    """Return the special tokens that occur in the encodings of `literals`."""
    tokens = (token for text in literals for token in tokenizer.encode(text, add_special_tokens=False))
    return vocabulary.special & {*tokens}


def calling_of(tokenizer: TokenizerWrapper) -> int | None:
    """Return the token that opens the model's own tool calls (in reasoning too), if it is a single token."""
    tokens: Sequence[int] = tokenizer.tool_call_start_tokens or ()
    return tokens[0] if len(tokens) == 1 else None


def _names(vocabulary: Vocabulary, signs: Markers) -> dict[str, str]:
    return {vocabulary.spell(token).decode(): sign for token, sign in signs.of.items()}


def _add_openings(
    edges: Edges, tokenizer: TokenizerWrapper, names: Mapping[str, str]
) -> dict[str, CallOpening]:
    """Add a state for each tool-call marker; return what each of these states opens."""
    openings: dict[str, CallOpening] = {}

    def add(origin: str, form: str, reader: Reader) -> None:
        state = f"{CALL} {form}"
        openings[state] = CallOpening(form, reader)
        edges[origin].append((form, state))
        edges[state] = []

    for marker, reader in READERS.items():
        for form in sorted({marker, signed(marker, names)}):
            add(CONTENT, form, reader)
    for origin, leaving in tokenizer.response_transitions.items():
        for marker in (marker for marker, then in leaving if then == CALL and marker in READERS):
            for form in sorted({marker, signed(marker, names)}):
                add(origin, form, READERS[marker])
    if is_harmony(tokenizer):
        for state in HARMONY_HEADS:
            add(state, HARMONY_CALL, read_harmony)
    own = tokenizer.tool_call_start
    if own in READERS and REASONING in edges and signed(own, names) != own:
        add(REASONING, signed(own, names), READERS[own])
    return openings


def answer_tags_of(tokenizer: TokenizerWrapper) -> Iterator[str]:
    """Yield the tags that the chat template knows."""
    text = str(getattr(tokenizer, "chat_template", None) or "")
    for start, end in _KNOWN:
        template = template_of(tokenizer) if start in text else None
        if template is not None and _knows(template, start, end):
            yield from (start, end)


def _knows(template: Template, start: str, end: str) -> bool:
    """Return whether a template writes the tags around answers, asks for them, or cuts them off. It may have
    them for other things, such as results of tools (MiniMax)."""
    thinking = {"enable_thinking": True, "thinking": True}
    tagged = attempt(template, [USER, ANSWER | {"content": f"{start}{ANSWER['content']}{end}"}])
    is_cut = ANSWER["content"] in tagged and start not in tagged
    return is_cut or start in attempt(template, [USER, ANSWER], options=thinking)


def unread(template: Template, tokenizer: TokenizerWrapper, open: Open) -> list[Kind]:
    """Return the kinds of output that clients would get as text."""
    kinds: list[Kind] = []
    written = not template.wants.writes_calls and TOOL_NAME in attempt(template, [USER], [TOOL])
    if written and not _finds(template, tokenizer, open, [CALLED[0]], tools=[TOOL]):
        kinds.append("tool_calls")
    calling = {**CALLED[0], "reasoning_content": THOUGHT}
    if not all(_finds(template, tokenizer, open, said) for said in ([HIDDEN], [calling, CALLED[1]])):
        kinds.append("reasoning")
    return kinds


def _finds(
    template: Template, tokenizer: TokenizerWrapper, open: Open, said: Messages, tools: Tools | None = None
) -> bool:
    """Return whether the call (with `tools`) or the thought of an answer is found, if it is written."""
    rendered = attempt(template, [USER, *said], tools, opens_turn=False)
    wanted = "value-0" if tools else THOUGHT
    if wanted not in rendered:
        return True
    turns = [(rendered.rpartition(str(USER["content"]))[2], CONTENT)]
    prompt = attempt(template, [USER], tools)
    if prompt and rendered.startswith(prompt):
        opening = opening_of(tokenizer, prompt, lambda: attempt(template, [USER], tools, opens_turn=False))
        turns.append((rendered.removeprefix(prompt), opening))
    return any(_is_read(tokenizer, open(state, bool(tools)), text, wanted) for text, state in turns)


def _is_read(tokenizer: TokenizerWrapper, processor: OutputProcessor, text: str, wanted: str) -> bool:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    deltas = [*map(processor.push, tokens), processor.flush(has_ended=True)]
    return wanted not in "".join(delta.text for delta in deltas)
