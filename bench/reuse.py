"""Prefix reuse in a conversation's turns and by requests with a common prefix, and its tables."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.client import Answer
from bench.timing import Ratio, print_table

NOT_SAID = "not reported"


@dataclass(frozen=True)
class Turn:
    """One turn. `seen_tokens`: the prompt of the turn before, all of which the server has processed
    already."""

    prompt_tokens: int
    seen_tokens: int
    cached_tokens: int | None
    first_text_s: float


@dataclass(frozen=True)
class Trace:
    """A conversation's turns by number. `cold_s`: for some turns, seconds to first text without reuse."""

    turns: Mapping[int, Turn]
    cold_s: Mapping[int, float]


@dataclass(frozen=True)
class Crowd:
    """Several first requests at once, and one alone before them. `prefilled`: prompt tokens computed for all
    of them together, relative to the one; None if the server does not report it."""

    alone_s: float
    all_s: float
    prefilled: float | None


@dataclass(frozen=True)
class Spread:
    """Minimum and median over several turns."""

    least: float
    median: float


def _spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), statistics.median(values))


def shares(traces: Sequence[Trace], whole: Callable[[Turn], int]) -> Spread | None:
    """Return cached tokens over `whole`, of every turn of every round; None if one is not reported."""
    found = []
    for turn in itertools.chain.from_iterable(trace.turns.values() for trace in traces):
        if turn.cached_tokens is None:
            return None
        found.append(turn.cached_tokens / whole(turn))
    return _spread(found)


def speedups(traces: Sequence[Trace]) -> Spread:
    """Return the time to first text without reuse over that in the conversation; of each turn the median of
    its rounds."""
    return _spread(list(_over_rounds(traces, lambda turn, cold_s: cold_s / turn.first_text_s)))


def _over_rounds(traces: Sequence[Trace], figure: Callable[[Turn, float], float]) -> Iterator[float]:
    for number in traces[0].cold_s:
        yield statistics.median(figure(trace.turns[number], trace.cold_s[number]) for trace in traces)


def prefilled(answers: Sequence[Answer], prompt_tokens: int) -> float | None:
    """Return the prompt tokens computed for `answers`, over `prompt_tokens`; None if one is not reported."""
    computed = 0
    for answer in answers:
        if answer.cached_tokens is None:
            return None
        computed += answer.prompt_tokens - answer.cached_tokens
    return computed / prompt_tokens


# --- the tables --------------------------------------------------------------------------------------


def print_traces(title: str, model: str, traces: Mapping[str, Sequence[Trace]]) -> None:
    """Print a table with a row for each server, over all its rounds."""
    print_table(
        title,
        [
            model,
            "prompt",
            "cached, least",
            "median",
            "of seen",
            "cold, ms",
            "warm, ms",
            "cold / warm",
            "least",
        ],
        [_trace_line(name, rounds) for name, rounds in traces.items()],
        "Columns: prompt tokens; the cached share of the prompt, minimum and median of all turns; cached "
        "tokens over the prompt of the turn before, minimum; time to first text without reuse and in the "
        "conversation, and the ratio of the first to the second: median and minimum over turns, each turn "
        "the median of its rounds.",
    )


def _trace_line(name: str, rounds: Sequence[Trace]) -> list[str]:
    prompts = sorted({turn.prompt_tokens for trace in rounds for turn in trace.turns.values()})
    cold = statistics.median(_over_rounds(rounds, lambda turn, cold_s: cold_s))
    warm = statistics.median(_over_rounds(rounds, lambda turn, cold_s: turn.first_text_s))
    speedup = speedups(rounds)
    return [
        name,
        f"{prompts[0]}-{prompts[-1]}",
        *_percents(shares(rounds, lambda turn: turn.prompt_tokens)),
        _percents(shares(rounds, lambda turn: turn.seen_tokens))[0],
        f"{1000 * cold:,.0f}",
        f"{1000 * warm:,.0f}",
        f"{speedup.median:.1f}",
        f"{speedup.least:.1f}",
    ]


def _percents(found: Spread | None) -> list[str]:
    if found is None:
        return [NOT_SAID, NOT_SAID]
    return [f"{100 * found.least:.1f}%", f"{100 * found.median:.1f}%"]


def print_turns(title: str, model: str, traces: Mapping[str, Sequence[Trace]]) -> None:
    """Print a row for each turn, with two columns per server: cached of prompt tokens in the last round, and
    ms."""
    numbers = sorted(next(iter(traces.values()))[0].turns)
    lines = []
    for number in numbers:
        cells = []
        for rounds in traces.values():
            turn = rounds[-1].turns[number]
            cached = "?" if turn.cached_tokens is None else str(turn.cached_tokens)
            times = [trace.turns[number].first_text_s for trace in rounds]
            cells += [f"{cached}/{turn.prompt_tokens}", f"{1000 * statistics.median(times):,.0f}"]
        lines.append([str(number), *cells])
    columns = itertools.chain.from_iterable([name, "ms"] for name in traces)
    print_table(
        title,
        [f"{model}, turn", *columns],
        lines,
        "Columns: cached of prompt tokens, in the last round; milliseconds to first text, medians of rounds.",
    )


def print_crowds(title: str, model: str, crowds: Mapping[str, Sequence[Crowd]]) -> None:
    """Print a table with a row for each server, over all its rounds."""
    print_table(
        title,
        [model, "one, ms", "all, ms", "all / one", "prefilled / one"],
        [_crowd_line(name, rounds) for name, rounds in crowds.items()],
        "Columns: time to first text of one request alone, and until all have text, medians; ratio of the "
        "second to the first; prompt tokens computed for all over those of one: medians (smallest-largest).",
    )


def _crowd_line(name: str, rounds: Sequence[Crowd]) -> list[str]:
    said = [each.prefilled for each in rounds if each.prefilled is not None]
    return [
        name,
        f"{1000 * statistics.median(each.alone_s for each in rounds):,.0f}",
        f"{1000 * statistics.median(each.all_s for each in rounds):,.0f}",
        _ratio([each.all_s / each.alone_s for each in rounds]),
        _ratio(said) if said else NOT_SAID,
    ]


def _ratio(rounds: Sequence[float]) -> str:
    return str(Ratio(statistics.median(rounds), min(rounds), max(rounds)))
