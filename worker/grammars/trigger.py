"""Trigger of structured output: scans an answer for the marker at which its grammar begins.

Markers are searched in the text, as in the output processor, so their tokenization does not matter.
"""

from __future__ import annotations

import codecs

from worker.grammars.tokenizer import GrammarTokenizer
from worker.output.channels import Edges, Transitions, TransitionScanner, signs_of


class Markup:
    """Markers of one model's answers. Immutable and shared."""

    def __init__(self, edges: Edges, lexicon: GrammarTokenizer) -> None:
        used = "\n".join(marker for leaving in edges.values() for marker, _ in leaving)
        tokens = {token: name for name, token in lexicon.names.items() if name in used}
        self.lexicon = lexicon
        self.signs = signs_of(tokens)
        self.transitions = Transitions(edges, {tokens[token]: sign for token, sign in self.signs.items()})

    def open(self, state: str, target: str) -> TriggerScanner:
        """Return a scanner for an answer in `state` that waits for the state `target`."""
        return TriggerScanner(self, state, target)


class TriggerScanner:
    """Scanner of one answer's tokens until the state `target` begins."""

    def __init__(self, markup: Markup, state: str, target: str) -> None:
        self._markup = markup
        self._target = target
        self._scanner = TransitionScanner(markup.transitions, state)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> bytes | None:
        """Add a token; return its bytes behind the marker that begins the target; None: not reached yet."""
        _, rest = self._scanner.scan(self._text(token))
        while rest is not None:
            if self._scanner.state == self._target:
                partial, _ = self._decoder.getstate()
                return rest.encode(errors="ignore") + partial
            _, rest = self._scanner.scan(rest)
        return None

    def _text(self, token: int) -> str:
        sign = self._markup.signs.get(token)
        if sign is None:
            return self._decoder.decode(self._markup.lexicon.spell(token))
        return self._decoder.decode(b"", final=True) + sign
