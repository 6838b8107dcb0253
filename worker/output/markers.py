"""Markers in the text of answers: signs for special tokens, and the states that markers lead to.

Some markers are or contain special tokens, which have no text for clients. These appear in the text as
*signs*: lone surrogates, which no decoder produces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
Edges = Mapping[str, Iterable[tuple[str, str]]]
"""For each state, the markers that end it, each with the state that it begins."""

SIGNS_MAX = 2048
_SIGN_FIRST = 0xD800


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
