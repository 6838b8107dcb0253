"""Long prompts of which a few tokens matter: facts among filler, and a question for one of them at the end.

A fact is `:`, a name, its words and an end. Some lead on: `:`, a name, a word, `>` and another name, whose
words are then said as well. A question is `:` and a name. What is between are any names and words, so that
nothing but the `:` tells a fact from it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

END, TELL, LEAD = 0, 1, 2
FIRST_WORD, SIZE = 8, 1024
"""Tokens from the first on are names and words."""
WORDS = 3
FACT_TOKENS = WORDS + 3


@dataclass(frozen=True)
class Question:
    """`tokens` come behind the prompt; `places`: where in it the facts stand that the answer is in."""

    tokens: list[int]
    answer: list[int]
    places: list[int]


class Told:
    """A prompt of `tokens` tokens with `facts` facts anywhere in it, every other of which leads on."""

    def __init__(self, tokens: int, facts: int, seed: int) -> None:
        self._draw = random.Random(f"{seed} {tokens} {facts}")
        self._names = self._draw.sample(range(FIRST_WORD, SIZE), facts)
        plain = self._names[facts // 2 :]
        self._next = {name: self._draw.choice(plain) for name in self._names[: facts // 2]}
        self._said = {name: self._fact(name) for name in self._names}
        self._places: dict[int, int] = {}
        self.tokens = self._spread(tokens)

    @property
    def places(self) -> list[int]:
        """Where the facts stand, in order."""
        return list(self._places.values())

    def questions(self, count: int, *, leading: bool) -> list[Question]:
        """For different facts: plain ones, or those that lead on. So many, where there are as many."""
        half = len(self._next)
        names = self._names[:half] if leading else self._names[half:]
        return [self._question(name) for name in names[:count]]

    def _fact(self, name: int) -> list[int]:
        said = [TELL, name, *self._filler(WORDS), END]
        if name in self._next:
            said[3:5] = [LEAD, self._next[name]]
        return said

    def _question(self, name: int) -> Question:
        needed = [name, self._next[name]] if name in self._next else [name]
        says = [self._said[each][2:-1] for each in needed]
        return Question(
            [TELL, name],
            [token for words in says for token in words],
            [self._places[each] for each in needed],
        )

    def _spread(self, tokens: int) -> list[int]:
        filler = tokens - sum(map(len, self._said.values()))
        cuts = sorted(self._draw.randrange(filler + 1) for _ in self._names)
        order = self._draw.sample(self._names, len(self._names))
        told: list[int] = []
        for name, cut, before in zip(order, cuts, [0, *cuts], strict=False):
            told += self._filler(cut - before)
            self._places[name] = len(told)
            told += self._said[name]
        return told + self._filler(tokens - len(told))

    def _filler(self, count: int) -> Sequence[int]:
        return self._draw.choices(range(FIRST_WORD, SIZE), k=count)
