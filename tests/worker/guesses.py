"""What a drafter guesses for rows of random lives: read late and in pieces, some of it spoilt."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from worker.drafts import LATE_MAX, Drafter

GUESSES_MAX = 8
PIECE_TOKENS_MAX = 60


def guessed(
    drafter: Drafter, rows: Mapping[str, Sequence[int]], rng: random.Random, vocabulary: int
) -> dict[str, list[int]]:
    """Drafts for some of these rows, of each of which all tokens are given."""
    for row, tokens in rows.items():
        if not drafter.knows(row):
            continue
        late = tokens[drafter.length(row) :]
        if len(late) > LATE_MAX or (len(late) > 1 and rng.random() < 0.1):
            drafter.read(row, late[: rng.randint(1, PIECE_TOKENS_MAX)])
    news = {row: tokens[drafter.length(row) :] for row, tokens in rows.items()}
    near = {
        row: late
        for row, late in news.items()
        if drafter.knows(row) and 0 < len(late) <= LATE_MAX and rng.random() < 0.8
    }
    if not near:
        return {}
    drafts = {row: [*draft] for row, draft in drafter.draft(near, rng.randint(1, GUESSES_MAX)).items()}
    for draft in drafts.values():
        if rng.random() < 0.3:
            draft[rng.randrange(len(draft))] = rng.randrange(vocabulary)
    return drafts
