"""Jump-forward decoding: tokens that must follow in a grammar, up to tokenization and white space. Pure.

Forced text can be tokenized in several ways, and most grammars allow white space around punctuation. So the
tokens are proposals: the longest ones, with the white space that came last behind the same punctuation mark.
A token is certain only if it is the single one allowed.
"""

from __future__ import annotations

import re
import time

import numpy as np
from llguidance import LLMatcher

from worker.grammars.tokenizer import GrammarTokenizer
from worker.values import ForcedTokens

FORESEE_S_MAX = 0.002
"""Approximate limit of CPU time in seconds; a twentieth of it is usual. `Matcher` stops after repeated
excess."""
BYTES_MAX = 96
SAID_BYTES_MAX = 1024
"""Length of the end of the answer whose white space is imitated."""
WAYS_MAX = 32
"""If more tokens than this are allowed, the continuation is not forced."""
_BLANK = b" \t\r\n"
_MARKS = b"{[,:"


def expected_space(text: bytes) -> bytes:
    """Return the white space that is likely to follow: what came last behind the same punctuation mark."""
    said = text.rstrip(_BLANK)
    gap, mark = text[len(said) :], said[-1:]
    if not mark or mark not in _MARKS:
        return b""
    gaps: list[bytes] = re.findall(re.escape(mark) + rb"([ \t\r\n]*)(?![ \t\r\n])", said[:-1])
    likely = gaps[-1] if gaps else b" " if mark in b":," else b""
    return likely[len(gap) :] if likely.startswith(gap) else b""


def forced_tokens(matcher: LLMatcher, lexicon: GrammarTokenizer, said: bytes, most: int) -> ForcedTokens:
    """Return at most `most` forced tokens. Changes no state. `said`: the end of the answer so far."""
    tokens = _Walk(matcher, lexicon, said).tokens()[:most]
    return ForcedTokens(tuple(tokens), _certain(matcher, lexicon, tokens)) if tokens else ForcedTokens()


class _Walk:
    """Walk along the forced continuation, on a copy of the matcher."""

    def __init__(self, matcher: LLMatcher, lexicon: GrammarTokenizer, said: bytes) -> None:
        self._matcher = matcher.deep_copy()
        self._lexicon = lexicon
        self._said = said
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
            if not (self._pass(expected_space(self._said + self._text) + way) or self._pass(way)):
                break
        return self._lexicon.tokens_of(self._text)

    def _pass(self, text: bytes) -> bool:
        """Advance by `text` if it is not empty and all of it is allowed; return whether it is."""
        tokens = self._lexicon.tokens_of(text)
        if not tokens or self._matcher.validate_tokens(tokens) != len(tokens):
            return False
        self._matcher.try_consume_tokens(tokens)
        self._text += text
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
