"""Trigger of structured output: scans an answer for the marker at which its grammar begins.

Markers are searched in the text, as in the output processor, so their tokenization does not matter. Special
tokens appear in the text as signs (`worker.output.channels`).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from worker.grammars.tokenizer import GrammarTokenizer
from worker.output.channels import signed, signs_of

Edges = Mapping[str, Sequence[tuple[str, str]]]
"""For each state, the markers that end it, each with the state that it begins."""


class Markup:
    """Markers of one model's answers. Immutable and shared."""

    def __init__(self, edges: Edges, lexicon: GrammarTokenizer) -> None:
        used = "\n".join(marker for leaving in edges.values() for marker, _ in leaving)
        tokens = {token: name for name, token in lexicon.names.items() if name in used}
        self.lexicon = lexicon
        self.signs = signs_of(tokens)
        names = {tokens[token]: sign for token, sign in self.signs.items()}
        self.edges: dict[str, dict[str, str]] = {}
        for state, leaving in edges.items():
            forms = {form: then for marker, then in leaving for form in (marker, signed(marker, names))}
            self.edges[state] = forms
        self.held_max = max((len(form) for forms in self.edges.values() for form in forms), default=1) - 1

    def open(self, state: str, target: str) -> TriggerScanner:
        """Return a scanner for an answer in `state` that waits for the state `target`."""
        return TriggerScanner(self, state, target)


class TriggerScanner:
    """Scanner of one answer until the state `target` begins."""

    def __init__(self, markup: Markup, state: str, target: str) -> None:
        self._markup = markup
        self._state = state
        self._target = target
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> bytes | None:
        """Add a token; return its bytes behind the marker that begins the target; None: not reached yet."""
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
        """Return the end of the marker that is completed first, and the state that it begins."""
        edges = self._markup.edges.get(self._state, {})
        found = (
            (place + len(form), then) for form, then in edges.items() if (place := self._held.find(form)) >= 0
        )
        return min(found, default=None)
