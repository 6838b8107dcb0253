"""Seeded random prompts of a given length, distinct except for a shared prefix. Pure.

The number of tokens per word depends on the server's tokenizer, and is measured with two requests (`Scale`).
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
"""Assumption for plain English if it cannot be measured."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Token count of a server's prompts: `fixed` for its template plus `per_word` for each word."""

    fixed: float = 0.0
    per_word: float = TOKENS_PER_WORD

    @classmethod
    def measured(cls, words: int, tokens: int, other_words: int, other_tokens: int) -> Scale:
        """Compute the scale from the token counts of two prompts."""
        per_word = (tokens - other_tokens) / (words - other_words)
        if per_word <= 0:
            return cls()
        return cls(max(0.0, tokens - words * per_word), per_word)

    def words(self, tokens: int) -> int:
        """Return the number of words that make about `tokens` tokens, at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Length of a prompt in tokens. `shared`: the part of `prompt` that is equal in all prompts of a run."""

    prompt: int
    shared: int = 0


def text(shape: PromptShape, scale: Scale, seed: str, number: int = 0) -> str:
    """Return a prompt. `seed`: that of the run and of its shared prefix; `number`: that of this prompt."""
    total = scale.words(shape.prompt)
    shared = min(total - 1, round(shape.shared / scale.per_word)) if shape.shared else 0
    return " ".join([*_drawn(shared, seed), *_drawn(total - shared, f"{seed} {number}")])


def _drawn(count: int, seed: str) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)
