"""How likely the tokens of prompts are, for clients that ask it: found out chunk by chunk, and told at once.

What must hold: rows of one family know equally much of their prompt (`Row.scored`), since whatever one of
them finds out is told to each. What was told is not asked again, whatever becomes of the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from protocol.parts import PromptToken
from worker.contract import Likelihood, Targets
from worker.schedule.answer import Answer
from worker.schedule.rows import Chunk, Group, Row

PART_TOKENS_MAX = 1024
"""Of one message: some hundred kilobytes."""


def asked_of(group: Group, relatives: Callable[[Row], Sequence[Row]]) -> dict[str, Targets]:
    """What is asked of the chunks of a group, by row. `relatives`: who is told of what a row finds out."""
    asked = {
        chunk.row.id: targets_of(chunk, relatives(chunk.row)) for chunk in group if not chunk.row.is_scored
    }
    return {id: targets for id, targets in asked.items() if targets is not None}


def targets_of(chunk: Chunk, family: Sequence[Row]) -> Targets | None:
    """What is asked of a chunk that is going to run: each position of it tells of the token behind it. None:
    nothing. `family`: all rows that are told, each with as many of the likeliest as it wants."""
    row = chunk.row
    first = max(row.scored, chunk.begin + 1)
    tokens = row.tokens[first : chunk.begin + len(chunk.tokens) + 1]
    if row.is_scored or not tokens:
        return None
    return Targets(tokens, max(other.request.draw.logprobs or 0 for other in family))


def known_of(row: Row, likelihoods: Sequence[Likelihood]) -> list[Likelihood | None]:
    """What is known now of the next tokens of a prompt. The first one follows nothing, and has none."""
    beginning: list[Likelihood | None] = [None] if row.scored == 0 else []
    left = len(row.request.tokens) - row.scored
    return [*beginning, *likelihoods][:left]


def parts_of(answer: Answer, known: Sequence[Likelihood | None]) -> Iterator[tuple[int, list[PromptToken]]]:
    """What one row's client is told of it, by the number of each part's first token."""
    begin = answer.row.scored
    tokens = answer.row.request.tokens[begin : begin + len(known)]
    for at in range(0, len(known), PART_TOKENS_MAX):
        part = slice(at, at + PART_TOKENS_MAX)
        yield begin + at, list(map(answer.spell_prompt, tokens[part], known[part]))
