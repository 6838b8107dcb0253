"""One answer's copy of a compiled grammar: what it takes, and what it allows next.

llguidance bounds what one mask may cost, but not what an ambiguous grammar costs with each token that has
come, which grows without end. So the time is taken: a body that is slow for several tokens on end has failed,
as one has that llguidance gives up. It is the time that this thread computes, so a busy machine makes no
difference.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from worker.grammars.foresight import FORESEE_S_MAX, Spacing, foresee
from worker.grammars.lexicon import Lexicon
from worker.guides import Foreseen

SLOW_S = 0.1
"""What a token or a mask may cost; a hundredth of it is usual."""
SLOW_MAX = 5
"""How many may on end cost more."""
OPAQUE_LOOKS = 3
"""Where it took too long so often on end to tell how an answer goes on, it is asked no more: once may be the
garbage collector."""

Words = NDArray[np.uint32]
"""A mask: bit t % 32 of word t // 32 is token t's."""


class GuideError(Exception):
    """The grammar is too complex for what has been generated, and can say no more of it."""


class Body:
    """Where an answer stands in one grammar."""

    def __init__(self, grammar: LLMatcher, lexicon: Lexicon) -> None:
        self._matcher = grammar.deep_copy()
        self._lexicon = lexicon
        self._slow = 0
        self._spacing = Spacing()
        self._unspaced: list[int] = []
        """Tokens that have come since it was last asked how the answer goes on."""
        self._opaque = 0
        """How often on end it took long to tell how it goes on."""

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow but an end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def may_take(self, token: int) -> bool:
        """Whether the token may come next."""
        return bool(self._timed(self._matcher.validate_tokens, [token]))

    def take(self, tokens: Sequence[int]) -> bool:
        """Whether these may come; then they have. One that has failed takes anything, until it is asked what
        may follow."""
        if self._has_failed():
            return True
        taken = self._timed(self._matcher.try_consume_tokens, [*tokens])
        self._unspaced += tokens
        return taken == len(tokens) or self._has_failed()

    def take_text(self, text: bytes) -> bool:
        """As `take`, for bytes. Half a character is not taken."""
        tokens = self._lexicon.tokens_of(text)
        return b"".join(map(self._lexicon.spell, tokens)) == text and self.take(tokens)

    def allow(self, words: Words) -> None:
        """Write what may follow, in as many words as tokens need. Raises `GuideError` if it has failed."""
        if not self._has_failed():
            self._timed(self._matcher.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)
        if self._has_failed():  # and has left an end of the answer in `words`, as if it were one
            error = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            raise GuideError(error or f"it takes more than {SLOW_S:g} s a token")

    def foresee(self, most: int) -> Foreseen:
        """See `guides.Guide`."""
        if self._has_failed() or self._opaque >= OPAQUE_LOOKS:
            return Foreseen()
        began = time.thread_time()
        for token in self._unspaced:
            self._spacing.saw(self._lexicon.spell(token))
        self._unspaced.clear()
        found = foresee(self._matcher, self._lexicon, self._spacing, most)
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


def allow_any(bodies: Sequence[Body], words: Words, size: int) -> None:
    """Write what one of them allows into the first `size` words, and nothing into the rest."""
    words[size if bodies else 0 :] = 0
    if bodies:
        bodies[0].allow(words[:size])
    for body in bodies[1:]:
        other = np.empty(size, np.uint32)
        body.allow(other)
        words[:size] |= other
