"""Synthetic grammars: the allowed tokens are a function of a seed, the number of tokens and the last token.

Their guides check themselves: each records its tokens and every breach of the guide contract.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker.values import ForcedTokens, Grammar

MODULUS_MAX = 7
FREE = 0.2
"""Probability that every token is allowed."""


def allows(seed: int, answered: Sequence[int]) -> tuple[int, int] | None:
    """Return modulus and remainder of the tokens allowed after `answered`; None: all tokens."""
    sampling = random.Random(f"{seed} {len(answered)} {answered[-1:]}")
    if sampling.random() < FREE:
        return None
    modulus = sampling.randint(2, MODULUS_MAX)
    return modulus, sampling.randrange(modulus)


class Unforeseeing:
    """Base of guides that have no forced tokens."""

    def forced_tokens(self, most: int) -> ForcedTokens:
        return ForcedTokens()


@dataclass
class RuleGuide(Unforeseeing):
    """`guides.Guide`. `seen`: the answer's tokens that it was given."""

    seed: int
    seen: list[int]
    breaches: list[str]
    asked: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def accept_token(self, token: int) -> None:
        self._alone(lambda: self.seen.append(token))

    def fill(self, mask: memoryview) -> bool:
        return self._alone(lambda: self._fill(mask))

    def _fill(self, mask: memoryview) -> bool:
        if mask.format != "I" or any(mask):
            self.breaches.append("a mask that is not empty")
        self.asked += 1
        rule = allows(self.seed, self.seen)
        if rule is None:
            return False
        bits = np.arange(8 * mask.nbytes) % rule[0] == rule[1]
        np.frombuffer(mask, np.uint8)[:] = np.packbits(bits, bitorder="little")
        return True

    def _alone(self, act: Callable[[], Any]) -> Any:
        if not self._turn.acquire(blocking=False):
            self.breaches.append("two threads at a time")
            return act()
        try:
            return act()
        finally:
            self._turn.release()


@dataclass(frozen=True)
class RuleGrammar:
    """`guides.Grammar`. `opened`: its guides, and the number of tokens with which each was opened."""

    seed: int
    opened: list[tuple[int, RuleGuide]] = field(default_factory=list, compare=False, repr=False)

    def open(self, answered: Sequence[int]) -> RuleGuide:
        guide = RuleGuide(self.seed, list(answered), [])
        self.opened.append((len(answered), guide))
        return guide

    def check(self, answer: Sequence[int]) -> None:
        """Check that every guide got the answer's tokens and that each was allowed. A guide may have more
        tokens, drawn beyond the end."""
        for _, guide in self.opened:
            assert guide.breaches == []
            common = min(len(guide.seen), len(answer))
            assert guide.seen[:common] == list(answer[:common])
        for index, token in enumerate(answer):
            rule = allows(self.seed, answer[:index])
            assert rule is None or token % rule[0] == rule[1], index


def processor(grammar: Grammar) -> Callable[[Any, Any], Any]:
    """Return the grammar as a logits processor for one answer, as upstream expects it."""
    import mlx.core as mx

    guide = grammar.open(())
    calls = 0

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        if calls:
            guide.accept_token(int(np.array(tokens[-1])))
        calls += 1
        vocabulary = logits.shape[-1]
        words = np.zeros(-(-vocabulary // 32), np.uint32)
        if not guide.fill(words.data):
            return logits
        allowed = np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little")
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)

    return process
