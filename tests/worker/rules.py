"""Grammars made by hand: what may come next is a function of a seed, how many tokens there are, and the last.

They come with their own judge: a guide notes what it has seen, and every breach of what it may expect.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker.guides import Grammar

MODULUS_MAX = 7
FREE = 0.2
"""How often anything may come next."""


def allows(seed: int, answered: Sequence[int]) -> tuple[int, int] | None:
    """Of the tokens that may follow an answer the modulus and the rest; None: all may."""
    draw = random.Random(f"{seed} {len(answered)} {answered[-1:]}")
    if draw.random() < FREE:
        return None
    modulus = draw.randint(2, MODULUS_MAX)
    return modulus, draw.randrange(modulus)


@dataclass
class RuleGuide:
    """`guides.Guide`. `seen`: the answer, as far as it was told of it."""

    seed: int
    seen: list[int]
    breaches: list[str]
    asked: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, token: int) -> None:
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
    """`guides.Grammar`. `opened`: its guides, and with how many tokens each has begun."""

    seed: int
    opened: list[tuple[int, RuleGuide]] = field(default_factory=list, compare=False, repr=False)

    def open(self, answered: Sequence[int]) -> RuleGuide:
        guide = RuleGuide(self.seed, list(answered), [])
        self.opened.append((len(answered), guide))
        return guide

    def check(self, answer: Sequence[int]) -> None:
        """Every guide was told the answer, token by token, and what came is what may. It may have been told
        more, of what was drawn beyond the end."""
        for _, guide in self.opened:
            assert guide.breaches == []
            common = min(len(guide.seen), len(answer))
            assert guide.seen[:common] == list(answer[:common])
        for index, token in enumerate(answer):
            rule = allows(self.seed, answer[:index])
            assert rule is None or token % rule[0] == rule[1], index


def processor(grammar: Grammar) -> Callable[[Any, Any], Any]:
    """The same grammar as upstream takes it, of one answer: a logits processor."""
    import mlx.core as mx

    guide = grammar.open(())
    calls = 0

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        if calls:
            guide.saw(int(tokens[-1].item()))
        calls += 1
        vocabulary = logits.shape[-1]
        words = np.zeros(-(-vocabulary // 32), np.uint32)
        if not guide.fill(words.data):
            return logits
        allowed = np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little")
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)

    return process
