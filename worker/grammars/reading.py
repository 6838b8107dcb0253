"""Reads an answer for the marker where its guide has to begin, as the output pipeline will read it.

Markers are found in the text, so that it does not matter which tokens spell them. Special tokens stand in it
as signs (`worker.output.channels`).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from worker.grammars.lexicon import Lexicon
from worker.output.channels import signs_of

Edges = Mapping[str, Sequence[tuple[str, str]]]
"""Of each state the markers that end it, and the states that they begin."""


class Markup:
    """What one model's answers are marked by. Shared, and never changed."""

    def __init__(self, edges: Edges, lexicon: Lexicon) -> None:
        used = "\n".join(marker for leaving in edges.values() for marker, _ in leaving)
        tokens = {token: name for name, token in lexicon.names.items() if name in used}
        self.lexicon = lexicon
        self.signs = signs_of(tokens)
        names = {tokens[token]: sign for token, sign in self.signs.items()}
        self.edges: dict[str, dict[str, str]] = {}
        for state, leaving in edges.items():
            forms = {form: then for marker, then in leaving for form in (marker, _signed(marker, names))}
            self.edges[state] = forms
        self.held_max = max((len(form) for forms in self.edges.values() for form in forms), default=1) - 1

    def open(self, state: str, target: str) -> Reader:
        """For an answer in this state, until it is in another."""
        return Reader(self, state, target)


class Reader:
    """Where one answer stands, until `target` begins."""

    def __init__(self, markup: Markup, state: str, target: str) -> None:
        self._markup = markup
        self._state = state
        self._target = target
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> bytes | None:
        """The bytes of this token behind the marker by which the target begins; None: it has not."""
        self._held += self._text(token)
        while found := self._first():
            end, then = found
            self._held, self._state = self._held[end:], then
            if then == self._target:
                partial, _ = self._decoder.getstate()
                return self._held.encode(errors="ignore") + partial
        self._held = self._held[-self._markup.held_max :] if self._markup.held_max else ""
        return None

    def _text(self, token: int) -> str:
        sign = self._markup.signs.get(token)
        if sign is None:
            return self._decoder.decode(self._markup.lexicon.spell(token))
        return self._decoder.decode(b"", final=True) + sign

    def _first(self) -> tuple[int, str] | None:
        """Where the marker ends that is complete first, and what it begins."""
        edges = self._markup.edges.get(self._state, {})
        found = (
            (place + len(form), then) for form, then in edges.items() if (place := self._held.find(form)) >= 0
        )
        return min(found, default=None)


def _signed(marker: str, names: Mapping[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        marker = marker.replace(name, names[name])
    return marker
