"""Long prompts in which few tokens matter: facts among filler, with a question about one fact at the end.

A fact is `:`, a name, its words and an end token. Some facts refer to another: `:`, a name, a word, `>` and
the other name, whose words then belong to the answer too. A question is `:` and a name. The filler consists
of random names and words, so only the `:` marks a fact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

END, TELL, LEAD = 0, 1, 2
FIRST_WORD, SIZE = 8, 1024
"""The first token id that is a name or word, and the size of the vocabulary."""
WORDS = 3
FACT_TOKENS = WORDS + 3


@dataclass(frozen=True)
class Question:
    """A question about a fact. `tokens` follow the prompt; `places`: positions in it of the facts that hold
    the answer."""

    tokens: list[int]
    places: list[int]


class FactPrompt:
    """A prompt of `tokens` tokens with `facts` facts at random positions, half of which refer to another
    fact."""

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
        """Return the positions of the facts, in order."""
        return list(self._places.values())

    def questions(self, count: int, *, leading: bool) -> list[Question]:
        """Return at most `count` questions about different facts. `leading`: about facts that refer to
        another one."""
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
        return Question([TELL, name], [self._places[each] for each in needed])

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

    def _filler(self, count: int) -> list[int]:
        return self._draw.choices(range(FIRST_WORD, SIZE), k=count)
