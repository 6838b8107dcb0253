"""Prompt logprobs: computed and published chunk by chunk, for requests that ask for them.

Invariant: rows of one family have the same `Row.scored`, since results of one are published to all. What was
published is not computed again, even if caches are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from protocol.types import PromptToken
from worker.core.request_output import spell_prompt
from worker.core.rows import Chunk, Group, Row
from worker.values import Logprob, LogprobTargets

PART_TOKENS_MAX = 1024
"""Maximum tokens per message, which is then some hundred kilobytes."""


def asked_of(group: Group, relatives: Callable[[Row], Sequence[Row]]) -> dict[str, LogprobTargets]:
    """Return the logprob targets of a group's chunks, by row id. `relatives`: returns a row's family."""
    asked = {
        chunk.row.id: targets_of(chunk, relatives(chunk.row)) for chunk in group if not chunk.row.is_scored
    }
    return {id: targets for id, targets in asked.items() if targets is not None}


def targets_of(chunk: Chunk, prompt_group: Sequence[Row]) -> LogprobTargets | None:
    """Return the logprob targets of a chunk that is going to run; None if there are none.

    Each position gives the logprob of the token after it. Enough of the most likely tokens are computed for
    every row in `prompt_group`.
    """
    row = chunk.row
    first = max(row.scored, chunk.begin + 1)
    tokens = row.tokens[first : chunk.begin + len(chunk.tokens) + 1]
    if row.is_scored or not tokens:
        return None
    return LogprobTargets(tokens, max(other.request.sampling.logprobs or 0 for other in prompt_group))


def logprobs_of(row: Row, likelihoods: Sequence[Logprob]) -> list[Logprob | None]:
    """Return the new logprobs of a prompt's next tokens. The very first token has none."""
    beginning: list[Logprob | None] = [None] if row.scored == 0 else []
    left = len(row.request.tokens) - row.scored
    return [*beginning, *likelihoods][:left]


def parts_of(row: Row, known: Sequence[Logprob | None]) -> Iterator[tuple[int, list[PromptToken]]]:
    """Yield one row's messages: the index of the first token, and the tokens with their logprobs."""
    begin = row.scored
    tokens = row.request.tokens[begin : begin + len(known)]
    for at in range(0, len(known), PART_TOKENS_MAX):
        part = slice(at, at + PART_TOKENS_MAX)
        yield begin + at, list(map(partial(spell_prompt, row), tokens[part], known[part]))
