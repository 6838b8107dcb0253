"""What the engine gets of rows beside their chunks: adapters, images, gaps, last tokens, logprob targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from worker.core.rows import Chunk, Group, Row
from worker.interfaces import Engine
from worker.values import NO_LAST, LogprobTargets


def set_inputs(engine: Engine, group: Group) -> None:
    """Pass the engine the adapters and images of rows whose caches are about to be created, and the gaps of
    others."""
    for row in (chunk.row for chunk in group):
        if not row.prefilled:
            engine.expect_tokens(row.id, len(row.tokens))
        if row.request.adapter and not row.prefilled:
            engine.set_adapter(row.id, row.request.adapter)
        if row.images and not row.prefilled:
            engine.set_images(row.id, row.tokens, row.images)
        if gap := row.gap(row.prefilled):
            engine.skip_tokens(row.id, row.prefilled - gap, row.prefilled)


def last_tokens(engine: Engine, group: Group, *, is_stored: bool) -> Mapping[str, int]:
    """Return the last tokens of the prompts that end with their chunks, to be fed along.

    None where a cache must stop before that token, to be stored with recurrent states that an equal prompt
    can begin with. `is_stored`: caches are stored.
    """
    if is_stored and engine.shape is not None and engine.shape.has_states:
        return NO_LAST
    ending = [chunk for chunk in group if chunk.last and chunk.tokens]
    return {chunk.row.id: chunk.row.tokens[-1] for chunk in ending}


def drop_rows(engine: Engine, group: Group) -> None:
    """Drop the caches of all rows of a group."""
    for chunk in group:
        engine.drop(chunk.row.id)


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
