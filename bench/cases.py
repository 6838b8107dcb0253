"""The cases of `bench.engine`. Imports MLX, so import this only after the BLAS has been loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_lm.utils import load as load_upstream

from bench.models import bench_folder, random_tokens
from bench.ours import Ours, load
from bench.sides import Alone, Ask, Bare, Side, Upstream, measured
from bench.timing import Measure, Work, alternate
from worker.interfaces import Model
from worker.values import SamplingParams

PROMPT_TOKENS = 126
STEPS = 16
TURNS = 4
SAMPLED_ROWS = 16
SAMPLED_STEPS = 4

FILTERS = (
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=50),
    SamplingParams(temperature=1.2, min_p=0.1),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=64),
)
PENALTIES = (
    *FILTERS[:4],
    SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, top_k=20, logit_bias=((5, -4.0), (99, 2.0))),
    SamplingParams(temperature=0.6, top_p=0.95, repetition_penalty=1.05, presence_penalty=1.0),
)


@dataclass(frozen=True)
class Line:
    """One row of the table: the work of each side in each round."""

    case: str
    done: dict[str, list[Work]]


class Bench:
    """One model, loaded once for our engine and once by upstream."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = bench_folder(name)
        self.ours: Model = load(folder)
        loaded: tuple[Any, ...] = load_upstream(str(folder))
        self.network, self.tokenizer = loaded[:2]

    def sides(self, rows: int, *, bare: bool = True) -> dict[str, Side]:
        """Return our side and those to compare with, including upstream's single stream if `rows` is 1."""
        sides: dict[str, Side] = {"bare": Bare(self.network)} if bare else {}
        sides |= {"ours": Ours(self.ours, rows), "BatchGenerator": Upstream(self.network, rows)}
        return sides | ({"stream_generate": Alone(self.network, self.tokenizer)} if rows == 1 else {})


def steady(
    bench: Bench, asks: Callable[[int], list[Ask]], rows: int, rounds: int, steps: int
) -> dict[str, list[Work]]:
    """Measure a fixed batch that only decodes, `steps` steps a turn. `asks`: returns the requests, given the
    number of tokens that each must last for."""
    tokens_max = (rounds + 1) * TURNS * steps + 4 * STEPS
    with ExitStack() as stack:
        measures: dict[str, Measure] = {}
        for name, side in bench.sides(rows).items():
            stack.enter_context(closing(side))
            side.submit(asks(tokens_max))
            # Run until all rows have joined. Those that joined first are ahead, equally on each side.
            side.run(rows * STEPS)
            measures[name] = partial(measured, side, rows * steps)
        return alternate(measures, rounds, TURNS)


def decode(bench: Bench, rows: int, rounds: int) -> Line:
    """Measure greedy decoding alone."""

    def asks(tokens_max: int) -> list[Ask]:
        return [Ask(random_tokens(PROMPT_TOKENS, seed), tokens_max) for seed in range(rows)]

    return Line(f"{bench.name}, {rows} rows", steady(bench, asks, rows, rounds, STEPS))


def sampled(bench: Bench, draws: Sequence[SamplingParams], what: str, rounds: int) -> Line:
    """Measure sixteen rows with different sampling parameters; `bare` is greedy."""

    def asks(tokens_max: int) -> list[Ask]:
        return [
            Ask(random_tokens(PROMPT_TOKENS, row), tokens_max, draws[row % len(draws)])
            for row in range(SAMPLED_ROWS)
        ]

    return Line(what, steady(bench, asks, SAMPLED_ROWS, rounds, SAMPLED_STEPS))


def mixed(bench: Bench, rows: int, rounds: int) -> Line:
    """Measure twice as many requests as rows, all submitted at once, of 16 to 48 tokens: rows join and leave
    throughout."""

    def batches() -> Iterator[list[Ask]]:
        for seed in itertools.count(1000, 100):
            yield [
                Ask(random_tokens(PROMPT_TOKENS, seed + number), 16 + 11 * number % 33)
                for number in range(2 * rows)
            ]

    def measure(side: Side, batches: Iterator[list[Ask]]) -> Work:
        asks = next(batches)
        return measured(side, sum(ask.max_tokens for ask in asks), asks)

    with ExitStack() as stack:
        measures: dict[str, Measure] = {}
        for name, side in bench.sides(rows, bare=False).items():
            stack.enter_context(closing(side))
            measures[name] = partial(measure, side, batches())
        return Line(f"{bench.name}, {rows} rows", alternate(measures, rounds))
