"""How a model marks its thoughts: by what upstream knows of its tokenizer, read by upstream's state machine.

Ours beside upstream's `make_text_state_machine`: a marker that stands where it has no business, the end of a
thought in the content for one, is taken out too, for no marker may reach a client. What is held back is no
more than may become a marker, where upstream holds a long run of `<` whole. Nothing held is lost when an
answer ends by itself, where upstream drops it. Tool calls are left in the content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from worker.models.template import Render, behind_thoughts
from worker.output.channels import CONTENT, REASONING, signs_of
from worker.output.text import Vocabulary

Edges = dict[str, list[tuple[str, str]]]
_TOOL = "tool"


class Format:
    """One for each model. Without markers it is of no use: see `is_plain`."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: Vocabulary) -> None:
        edges = _edges_of(tokenizer)
        self.is_plain = not edges
        markers = {marker for leaving in edges.values() for marker, _ in leaving}
        special = {
            token
            for marker in markers
            for token in tokenizer.encode(marker, add_special_tokens=False)
            if token in vocabulary.special
        }
        self.signs = signs_of(special)
        names = {vocabulary.spell(token).decode(): sign for token, sign in self.signs.items()}
        # Spelled out in plain tokens a marker is one as well, as upstream has it.
        both = {marker: {marker, _signed(marker, names)} for marker in markers}
        self._machine = TextStateMachine(
            {
                state: [(form, then) for marker, then in leaving for form in sorted(both[marker])]
                for state, leaving in edges.items()
            }
        )
        self._held_max = max((len(marker) for marker in markers), default=1) - 1

    def open(self, state: str) -> Reading:
        """For an answer that begins in this state."""
        return Reading(self._machine.make_state(state), self._held_max)


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


class Reading:
    """`channels.Machine`: where one answer stands."""

    def __init__(self, position: Any, held_max: int) -> None:
        """`position`: upstream's (state, node, states, held text)."""
        self.state: str = position[0]
        self._position = position
        self._held_max = held_max

    def split(self, text: str) -> list[tuple[str, str]]:
        """See `channels.Machine`."""
        pieces: list[tuple[str, str]]
        position, pieces = TextStateMachine.split(self._position, text)
        self.state, node, states, held = position
        if len(held) > self._held_max:
            certain = len(held) - self._held_max
            pieces.append((self.state, held[:certain]))
            held = held[certain:]
            position = (self.state, node, states, held)
        self._position = position
        return pieces

    def rest(self) -> str:
        """See `channels.Machine`."""
        self._position, held, _ = TextStateMachine.flush(self._position)
        return str(held)


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
            if then != _TOOL:
                add([state], marker, then)
    if tokenizer.has_thinking:
        add([CONTENT, REASONING], tokenizer.think_start, REASONING)
        add([CONTENT, REASONING], tokenizer.think_end, CONTENT)
    for marker in tokenizer.structural_markers:
        add([CONTENT, REASONING], marker)
    return edges


def _signed(marker: str, names: dict[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        marker = marker.replace(name, names[name])
    return marker
