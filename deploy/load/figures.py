"""Five figures that say how fast a machine serves a model, for comparison with other machines. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.load.runner import Load, PromptShape
from deploy.load.samples import Rounds, Summary

ROUNDS = 3
_LONG = 2048
ALONE = Load(4, PromptShape(128), 128, concurrency=1)
EIGHT = Load(16, PromptShape(128), 128, concurrency=8)
LONG = Load(2, PromptShape(_LONG), 8, concurrency=1)
AGAIN = Load(5, PromptShape(_LONG, _LONG - 128), 8, concurrency=1)
"""Only the first of these is new, so the median is of prompts whose beginning is cached."""
LOADS = (ALONE, EIGHT, LONG, AGAIN)


@dataclass(frozen=True, slots=True)
class _Figure:
    """`of`: its value in one round; None if no answer had any."""

    name: str
    load: Load
    of: Callable[[Summary], float | None]


def _first_ms(each: Summary) -> float | None:
    return 1000 * each.first_s.at[50] if each.first_s else None


_FIGURES = (
    _Figure(
        "tokens/s, one request", ALONE, lambda each: 1 / each.per_token_s.at[50] if each.per_token_s else None
    ),
    _Figure("tokens/s, eight requests", EIGHT, lambda each: each.tokens_per_s or None),
    _Figure(
        "ms between two pieces of text, eight requests, p99",
        EIGHT,
        lambda each: 1000 * each.gap_s.at[99] if each.gap_s else None,
    ),
    _Figure(
        "prompt tokens/s, one request",
        LONG,
        lambda each: each.prompt_tokens / each.requests / each.first_s.at[50] if each.first_s else None,
    ),
    _Figure("ms to the first text, cached but for 128 tokens", AGAIN, _first_ms),
)


def errors(results: Sequence[tuple[Load, Rounds]]) -> list[str]:
    """Return the errors of all requests. With any of them the figures mean nothing."""
    summaries = (each for _, rounds in results for side in rounds.values() for each in side)
    return sorted({error for each in summaries for error in each.errors})


def figures(results: Sequence[tuple[Load, Rounds]]) -> list[dict[str, Any]]:
    """Return each figure's median, smallest and largest value of all rounds. `results`: of `LOADS`, on one
    side."""
    rounds: dict[Load, Sequence[Summary]] = {load: side for load, sides in results for side in sides.values()}
    values = {figure.name: [figure.of(each) for each in rounds[figure.load]] for figure in _FIGURES}
    return [
        _spread(name, known) for name, each in values.items() if (known := [x for x in each if x is not None])
    ]


def _spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    spread = {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}
    return {"figure": name, **{word: float(f"{value:.3g}") for word, value in spread.items()}}
