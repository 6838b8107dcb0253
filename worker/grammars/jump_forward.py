"""Jump-forward decoding: tokens that must follow in a grammar, up to tokenization and white space. Pure.

Forced text can be tokenized in several ways, and most grammars allow white space around punctuation. So the
tokens are proposals: the longest ones, with the white space that came last behind the same punctuation mark.
A token is certain only if it is the single one allowed.
"""

from __future__ import annotations

import time

import numpy as np
from llguidance import LLMatcher

from worker.grammars.tokenizer import GrammarTokenizer
from worker.values import ForcedTokens

FORESEE_S_MAX = 0.002
"""Approximate limit of CPU time in seconds; a twentieth of it is usual. `Matcher` stops after repeated
excess."""
BYTES_MAX = 96
WAYS_MAX = 32
"""If more tokens than this are allowed, the continuation is not forced."""
_BLANK = b" \t\r\n"
_MARKS = b"{[,:"


class Spacing:
    """White-space style of an answer: the white space that came last behind each punctuation mark."""

    def __init__(
        self, gaps: dict[int, bytes] | None = None, mark: int | None = None, gap: bytes = b""
    ) -> None:
        self._gaps = {**gaps} if gaps else {ord(":"): b" ", ord(","): b" "}
        self._mark = mark
        """Last byte that is not white space, if it is a punctuation mark."""
        self._gap = gap
        """White space behind it so far."""

    def copy(self) -> Spacing:
        return Spacing(self._gaps, self._mark, self._gap)

    def accept_token(self, text: bytes) -> None:
        """Add the next bytes of the answer."""
        for byte in text:
            if byte in _BLANK:
                self._gap += bytes([byte])
                continue
            if self._mark is not None:
                self._gaps[self._mark] = self._gap
            self._mark, self._gap = (byte if byte in _MARKS else None), b""

    def expected(self) -> bytes:
        """Return the white space that is likely to follow."""
        gap = b"" if self._mark is None else self._gaps.get(self._mark, b"")
        return gap[len(self._gap) :] if gap.startswith(self._gap) else b""


def forced_tokens(matcher: LLMatcher, lexicon: GrammarTokenizer, spacing: Spacing, most: int) -> ForcedTokens:
    """Return at most `most` forced tokens. Changes no state."""
    tokens = _Walk(matcher, lexicon, spacing).tokens()[:most]
    return ForcedTokens(tuple(tokens), _certain(matcher, lexicon, tokens)) if tokens else ForcedTokens()


class _Walk:
    """Walk along the forced continuation, on a copy of the matcher."""

    def __init__(self, matcher: LLMatcher, lexicon: GrammarTokenizer, spacing: Spacing) -> None:
        self._matcher = matcher.deep_copy()
        self._lexicon = lexicon
        self._spacing = spacing.copy()
        self._words = np.zeros(lexicon.blank_mask.size, np.uint32)
        self._text = b""

    def tokens(self) -> list[int]:
        """Return the forced tokens, up to `BYTES_MAX` bytes and `FORESEE_S_MAX` seconds."""
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
        """Advance by `text` if it is not empty and all of it is allowed; return whether it is."""
        tokens = self._lexicon.tokens_of(text)
        if not tokens or self._matcher.validate_tokens(tokens) != len(tokens):
            return False
        self._matcher.try_consume_tokens(tokens)
        self._text += text
        self._spacing.accept_token(text)
        return True

    def _way(self) -> bytes | int:
        """Return the only byte other than white space that may follow, or the only token that ends the
        answer; empty if there are several."""
        allowed = _allowed(self._matcher, self._words)
        firsts = {self._lexicon.spell(token).lstrip(_BLANK)[:1] for token in allowed} - {b""}
        ends = [token for token in allowed if token in self._lexicon.special]
        ways: list[bytes | int] = [*firsts, *ends]
        return ways[0] if len(ways) == 1 else b""


def _allowed(matcher: LLMatcher, words: np.ndarray) -> list[int]:
    """Return the tokens that may come next; empty if there are more than `WAYS_MAX`."""
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


def _certain(matcher: LLMatcher, lexicon: GrammarTokenizer, tokens: list[int]) -> int:
    """Return how many of the first tokens are each the only one allowed."""
    matcher, words = matcher.deep_copy(), np.zeros(lexicon.blank_mask.size, np.uint32)
    for count, token in enumerate(tokens):
        if _allowed(matcher, words) != [token]:
            return count
        if matcher.try_consume_tokens([token]) != 1:  # the end token of a finished grammar
            return count + 1
    return len(tokens)
