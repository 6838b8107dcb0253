"""Prompts of a wanted length, none like another but for what they are to share. Pure: seeded.

How many tokens a word is, only the server knows: a first request tells (`Scale`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = (
    "the engine house stands beside a long track and every morning the night crew hands over to the day crew"
    " while coal water sand and oil are taken on board the driver reads the orders checks the brake and waits"
    " for the signal then slowly the wheels begin to turn past the tower over the bridge into the valley"
    " where farms rivers roads and small stations follow one another until late in the evening"
)
WORDS = tuple(_TEXT.split())
TOKENS_PER_WORD = 1.2
"""Of plain English, before anything was measured."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What a server's tokens are: `fixed` for its template, and so many a word."""

    fixed: float = 0.0
    per_word: float = TOKENS_PER_WORD

    @classmethod
    def measured(cls, words: int, tokens: int, other_words: int, other_tokens: int) -> Scale:
        """From two prompts and what they came to."""
        per_word = (tokens - other_tokens) / (words - other_words)
        if per_word <= 0:
            return cls()
        return cls(max(0.0, tokens - words * per_word), per_word)

    def words(self, tokens: int) -> int:
        """As many as make up about so many tokens, at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a prompt, in tokens: `shared` is the same in all prompts of a run, and part of `prompt`."""

    prompt: int
    shared: int = 0


def text(shape: Shape, scale: Scale, seed: str, number: int = 0) -> str:
    """A prompt. `seed`: of a run, and of what its prompts share; `number`: of this one."""
    total = scale.words(shape.prompt)
    shared = min(total - 1, round(shape.shared / scale.per_word)) if shape.shared else 0
    return " ".join([*_drawn(shared, seed), *_drawn(total - shared, f"{seed} {number}")])


def _drawn(count: int, seed: str) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)
