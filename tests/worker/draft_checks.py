"""A drafter's proposals for rows of random scenarios: requested late and in parts, some of them corrupted."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from worker.interfaces import DraftProposer
from worker.values import BACKLOG_MAX

GUESSES_MAX = 8
PIECE_TOKENS_MAX = 60


def guessed(
    drafter: DraftProposer, rows: Mapping[str, Sequence[int]], rng: random.Random, vocabulary: int
) -> dict[str, list[int]]:
    """Return drafts for some of the rows; `rows` has all tokens of each."""
    for row, tokens in rows.items():
        if not drafter.knows(row):
            continue
        late = tokens[drafter.length(row) :]
        if len(late) > BACKLOG_MAX or (len(late) > 1 and rng.random() < 0.1):
            drafter.read(row, late[: rng.randint(1, PIECE_TOKENS_MAX)])
    new_tokens = {row: tokens[drafter.length(row) :] for row, tokens in rows.items()}
    near = {
        row: late
        for row, late in new_tokens.items()
        if drafter.knows(row) and 0 < len(late) <= BACKLOG_MAX and rng.random() < 0.8
    }
    if not near:
        return {}
    drafts = {row: [*draft] for row, draft in drafter.draft(near, rng.randint(1, GUESSES_MAX)).items()}
    for draft in drafts.values():
        if rng.random() < 0.3:
            draft[rng.randrange(len(draft))] = rng.randrange(vocabulary)
    return drafts
