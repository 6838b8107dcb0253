"""How an answer that is held to a grammar goes on where there is but one way, or one but for white space.

Text that must follow can be spelled in several tokens, and between marks of punctuation most grammars allow
for white space. So what is foreseen is a guess: the longest tokens, and the white space that the answer has
had behind the same mark before. Only a token that is the single one allowed is certain. Pure.
"""

from __future__ import annotations

import time

import numpy as np
from llguidance import LLMatcher

from worker.grammars.lexicon import Lexicon
from worker.guides import Foreseen

FORESEE_S_MAX = 0.002
"""What it may cost, roughly; a twentieth of it is usual. Who exceeds it again and again is asked no more."""
BYTES_MAX = 96
WAYS_MAX = 32
"""Where more tokens than these may come, there is more than one way."""
_BLANK = b" \t\r\n"
_MARKS = b"{[,:"


class Spacing:
    """How an answer is laid out: the white space that came last behind each mark."""

    def __init__(
        self, gaps: dict[int, bytes] | None = None, mark: int | None = None, gap: bytes = b""
    ) -> None:
        self._gaps = {**gaps} if gaps else {ord(":"): b" ", ord(","): b" "}
        self._mark = mark
        """The last byte that is not white, if it is a mark."""
        self._gap = gap
        """What has come behind it."""

    def copy(self) -> Spacing:
        return Spacing(self._gaps, self._mark, self._gap)

    def saw(self, text: bytes) -> None:
        """The next bytes of the answer."""
        for byte in text:
            if byte in _BLANK:
                self._gap += bytes([byte])
                continue
            if self._mark is not None:
                self._gaps[self._mark] = self._gap
            self._mark, self._gap = (byte if byte in _MARKS else None), b""

    def expected(self) -> bytes:
        """The rest of the white space that is likely to be here."""
        gap = b"" if self._mark is None else self._gaps.get(self._mark, b"")
        return gap[len(self._gap) :] if gap.startswith(self._gap) else b""


def foresee(matcher: LLMatcher, lexicon: Lexicon, spacing: Spacing, most: int) -> Foreseen:
    """At most so many tokens. Changes nothing."""
    tokens = _Walk(matcher, lexicon, spacing).tokens()[:most]
    return Foreseen(tuple(tokens), _certain(matcher, lexicon, tokens)) if tokens else Foreseen()


class _Walk:
    """Along the one way on, with a copy of everything."""

    def __init__(self, matcher: LLMatcher, lexicon: Lexicon, spacing: Spacing) -> None:
        self._matcher = matcher.deep_copy()
        self._lexicon = lexicon
        self._spacing = spacing.copy()
        self._words = np.zeros(lexicon.blank_mask.size, np.uint32)
        self._text = b""

    def tokens(self) -> list[int]:
        """All there are, up to `BYTES_MAX` or where it takes too long."""
        until = time.thread_time() + FORESEE_S_MAX
        while len(self._text) < BYTES_MAX and time.thread_time() < until:
            if not self._matcher.is_stopped() and self._pass(self._matcher.compute_ff_bytes()):
                continue
            way = self._way()
            if isinstance(way, int):
                return [*self._lexicon.tokens_of(self._text), way]
            if not (self._pass(self._spacing.expected() + way) or self._pass(way)):
                break
        return self._lexicon.tokens_of(self._text)

    def _pass(self, text: bytes) -> bool:
        """Whether this may come, some of it and whole; then it has."""
        tokens = self._lexicon.tokens_of(text)
        if not tokens or self._matcher.validate_tokens(tokens) != len(tokens):
            return False
        self._matcher.try_consume_tokens(tokens)
        self._text += text
        self._spacing.saw(text)
        return True

    def _way(self) -> bytes | int:
        """The first byte of all that may come and is not white, or the one token that ends the answer; no
        byte, if there are several."""
        allowed = _allowed(self._matcher, self._words)
        firsts = {self._lexicon.spell(token).lstrip(_BLANK)[:1] for token in allowed} - {b""}
        ends = [token for token in allowed if token in self._lexicon.special]
        ways: list[bytes | int] = [*firsts, *ends]
        return ways[0] if len(ways) == 1 else b""


def _allowed(matcher: LLMatcher, words: np.ndarray) -> list[int]:
    """The tokens that may come next; none, where these are many."""
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if int(np.bitwise_count(words).sum()) > WAYS_MAX:
        return []
    places = np.flatnonzero(words)
    return [
        32 * place + bit
        for place, word in zip(places.tolist(), words[places].tolist(), strict=True)
        for bit in range(32)
        if word >> bit & 1
    ]


def _certain(matcher: LLMatcher, lexicon: Lexicon, tokens: list[int]) -> int:
    """How many of the first are each the only one that may stand there."""
    matcher, words = matcher.deep_copy(), np.zeros(lexicon.blank_mask.size, np.uint32)
    for count, token in enumerate(tokens):
        if _allowed(matcher, words) != [token]:
            return count
        if matcher.try_consume_tokens([token]) != 1:  # the end of what is over already
            return count + 1
    return len(tokens)
