"""Grammar matcher: one answer's copy of a compiled grammar, with its state.

llguidance bounds the cost of one mask, but with an ambiguous grammar the cost per token grows with the length
of the answer, without limit. So time is measured: a matcher that is slow for several consecutive tokens has
failed, like one that llguidance gives up. CPU time of the thread is measured, so machine load has no effect.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from worker.contract.guides import ForcedTokens
from worker.grammars.jump_forward import FORESEE_S_MAX, Spacing, forced_tokens
from worker.grammars.tokenizer import GrammarTokenizer

SLOW_S = 0.1
"""CPU time in seconds above which a token or a mask is slow; a hundredth of it is usual."""
SLOW_MAX = 5
"""Number of consecutive slow calls that are tolerated."""
OPAQUE_LOOKS = 3
"""Number of consecutive slow searches for forced tokens after which they stop. A single one may be due to the
garbage collector."""

Words = NDArray[np.uint32]
"""A token mask: bit t % 32 of word t // 32 belongs to token t."""


class GuideError(Exception):
    """The grammar is too complex for the text generated so far."""


class Matcher:
    """State of one answer in one grammar."""

    def __init__(self, grammar: LLMatcher, lexicon: GrammarTokenizer) -> None:
        self._matcher = grammar.deep_copy()
        self._lexicon = lexicon
        self._slow = 0
        self._spacing = Spacing()
        self._unspaced: list[int] = []
        """Tokens since the last search for forced tokens."""
        self._opaque = 0
        """Number of consecutive slow searches for forced tokens."""

    @property
    def is_over(self) -> bool:
        """Whether only the end of the answer can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def may_take(self, token: int) -> bool:
        """Whether the token may come next."""
        return bool(self._timed(self._matcher.validate_tokens, [token]))

    def take(self, tokens: Sequence[int]) -> bool:
        """Advance by `tokens`; return whether they are allowed. A failed matcher accepts anything until
        `allow` raises."""
        if self._has_failed():
            return True
        taken = self._timed(self._matcher.try_consume_tokens, [*tokens])
        self._unspaced += tokens
        return taken == len(tokens) or self._has_failed()

    def take_text(self, text: bytes) -> bool:
        """Advance by bytes, like `take`. Incomplete characters are not accepted."""
        tokens = self._lexicon.tokens_of(text)
        return b"".join(map(self._lexicon.spell, tokens)) == text and self.take(tokens)

    def allow(self, words: Words) -> None:
        """Write the mask of allowed tokens to `words`. Raises `GuideError` if the matcher has failed."""
        if not self._has_failed():
            self._timed(self._matcher.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)
        if self._has_failed():  # `words` then allows the end of the answer, wrongly
            error = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            raise GuideError(error or f"it takes more than {SLOW_S:g} s per token")

    def forced_tokens(self, most: int) -> ForcedTokens:
        """Return at most `most` forced tokens."""
        if self._has_failed() or self._opaque >= OPAQUE_LOOKS:
            return ForcedTokens()
        began = time.thread_time()
        for token in self._unspaced:
            self._spacing.accept_token(self._lexicon.spell(token))
        self._unspaced.clear()
        found = forced_tokens(self._matcher, self._lexicon, self._spacing, most)
        is_slow = time.thread_time() - began > 2 * FORESEE_S_MAX
        self._opaque = self._opaque + 1 if is_slow else 0
        return found

    def _has_failed(self) -> bool:
        return self._slow > SLOW_MAX or self._matcher.is_error()

    def _timed(self, work: Any, *arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return work(*arguments)
        finally:
            is_slow = time.thread_time() - began > SLOW_S
            self._slow = self._slow + 1 if is_slow else 0


def allow_any(bodies: Sequence[Matcher], words: Words, size: int) -> None:
    """Write the union of the matchers' masks to the first `size` words, and clear the rest."""
    words[size if bodies else 0 :] = 0
    if bodies:
        bodies[0].allow(words[:size])
    for body in bodies[1:]:
        other = np.empty(size, np.uint32)
        body.allow(other)
        words[:size] |= other
