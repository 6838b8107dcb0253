"""Results as a table for people and as a JSON document for programs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from deploy.load.runner import Load
from deploy.load.samples import Rounds, Spread, Summary

LEGEND = (
    "tok/s and req/s: all answers together, median over rounds. first, gap, request: milliseconds to the"
    " first text, between two pieces of text and of a whole request; median of the rounds' percentiles."
)
_TIMES = (("first_s", "first"), ("gap_s", "gap"), ("request_s", "request"))
_SHOWN = (50, 99)


def table(results: Sequence[tuple[Load, Rounds]]) -> Table:
    """Return a table with a row for each load and side."""
    found = Table(box=None, pad_edge=False, header_style="bold dim")
    times = [f"{name} p{percent}" for _, name in _TIMES for percent in _SHOWN]
    for name in ("load", "", "tok/s", "req/s", *times, "prompt", "errors"):
        found.add_column(name, justify="left" if name in ("load", "", "errors") else "right")
    for load, rounds in results:
        for number, (side, summaries) in enumerate(rounds.items()):
            found.add_row("" if number else load.name, side, *_cells(summaries))
    return found


def ratios(results: Sequence[tuple[Load, Rounds]]) -> list[str]:
    """Return, for two sides, a line per load with the ratio of their throughputs, paired by round."""
    lines = []
    for load, rounds in results:
        if len(rounds) == 2 and (found := _ratios(*rounds.values())):
            first, second = rounds
            spread = f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"
            lines.append(f"{load.name}: {first} has {spread} times the tok/s of {second}")
    return lines


def _ratios(first: Sequence[Summary], second: Sequence[Summary]) -> list[float]:
    pairs = zip(first, second, strict=True)
    return [mine.tokens_per_s / other.tokens_per_s for mine, other in pairs if other.tokens_per_s]


def _cells(rounds: Sequence[Summary]) -> list[str]:
    answered = sum(each.requests - sum(each.errors.values()) for each in rounds)
    prompt = sum(each.prompt_tokens for each in rounds) / answered if answered else 0.0
    shown = [(name, percent) for name, _ in _TIMES for percent in _SHOWN]
    return [
        f"{statistics.median(each.tokens_per_s for each in rounds):,.1f}",
        f"{statistics.median(each.requests_per_s for each in rounds):,.2f}",
        *(_time([getattr(each, name) for each in rounds], percent) for name, percent in shown),
        f"{prompt:,.0f}",
        _errors(rounds),
    ]


def _time(spreads: Sequence[Spread | None], percent: int) -> str:
    known = [1000 * spread.at[percent] for spread in spreads if spread is not None]
    return f"{statistics.median(known):,.0f}" if known else ""


def _errors(rounds: Sequence[Summary]) -> str:
    counts: dict[str, int] = {}
    for each in rounds:
        for what, count in each.errors.items():
            counts[what] = counts.get(what, 0) + count
    return ", ".join(f"{count}x {what}" for what, count in counts.items())


def document(results: Sequence[tuple[Load, Rounds]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return all results, in seconds and tokens."""
    return {
        "object": "bench",
        **about,
        "loads": [
            {
                **asdict(load),
                "sides": {side: [_summary(each) for each in found] for side, found in rounds.items()},
            }
            for load, rounds in results
        ],
    }


def _summary(summary: Summary) -> dict[str, Any]:
    fields = asdict(summary)
    for name in ("first_s", "gap_s", "per_token_s", "request_s"):
        if (spread := fields[name]) is not None:
            fields[name] = {
                "count": spread["count"],
                "mean": spread["mean"],
                **{f"p{percent}": value for percent, value in spread["at"].items()},
            }
    return fields | {"tokens_per_s": summary.tokens_per_s, "requests_per_s": summary.requests_per_s}
