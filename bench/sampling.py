"""Cost of sampling in a decode step: our sampler next to upstream's batch, on the same logits.

    python -m bench.sampling [--vocabulary 151936] [--rows 1 4 16] [--rounds 7] [--steps 3] [--dtype float32]

Upstream is `mlx_lm.generate.GenerationBatch` over a model that returns prepared logits, with `make_sampler`
and `make_logits_processors` for each row, as in its server. Both sides are double-buffered and read each
step's tokens; they take turns, so that noise affects both. Upstream samples without a seed per row and
penalizes only the last 20 tokens; our sampler uses (seed, position) and penalizes all tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle, islice
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

from worker.runner.sampling.sampler import Sampler
from worker.runner.sampling.state import SamplingState
from worker.values import SamplingParams

PROMPT = list(range(1000, 1200))
MIXED = [
    SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    SamplingParams(temperature=0.8, repetition_penalty=1.1, top_k=40),
    SamplingParams(temperature=1.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(repetition_penalty=1.1),
]
SETTINGS = {
    "all greedy": [SamplingParams()],
    "temperature": [SamplingParams(temperature=0.8)],
    "top_p 0.9": [SamplingParams(temperature=0.8, top_p=0.9)],
    "top_k 40": [SamplingParams(temperature=0.8, top_k=40)],
    "top_p 0.95, top_k 20": MIXED[:1],
    "min_p 0.05": [SamplingParams(temperature=0.8, min_p=0.05)],
    "penalties": [
        SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.3)
    ],
    "mixed": MIXED,
}

Steps = Iterator[Any]


def ours(draws: list[SamplingParams], logits: list[mx.array]) -> Steps:
    """Yield once per step: dispatch the next tokens, then read those of the step before."""
    sampler = Sampler(
        [
            SamplingState(replace(sampling, seed=seed), PROMPT, len(PROMPT))
            for seed, sampling in enumerate(draws)
        ]
    )
    pending = None
    for position, batch in zip(count(len(PROMPT)), cycle(logits), strict=False):
        sampled = sampler(batch, [position] * len(draws))
        mx.async_eval(sampled.tokens, sampled.arrays)
        yield pending.tokens.tolist() if pending else None
        pending = sampled


def upstreams(draws: list[SamplingParams], logits: list[mx.array]) -> Steps:
    """Yield once per step of upstream's batch."""
    batches = cycle(logits)
    batch = GenerationBatch(
        model=cast(nn.Module, lambda inputs, cache: next(batches)[:, None]),
        uids=list(range(len(draws))),
        inputs=mx.zeros(len(draws), mx.uint32),
        prompt_cache=[],
        tokens=[list(PROMPT) for _ in draws],
        samplers=[
            make_sampler(sampling.temperature, sampling.top_p, sampling.min_p, top_k=sampling.top_k)
            for sampling in draws
        ],
        fallback_sampler=greedy_sampler,
        logits_processors=[
            make_logits_processors(
                repetition_penalty=sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
                presence_penalty=sampling.presence_penalty or None,
                frequency_penalty=sampling.frequency_penalty or None,
            )
            for sampling in draws
        ],
        stop_sequences=[StopSequences([]) for _ in draws],
        max_tokens=[2**62] * len(draws),
    )
    while True:
        yield batch.next()


def step_ms(steps: Steps, number: int) -> float:
    """Return the milliseconds per step over `number` steps, with all dispatched work completed."""
    began = time.perf_counter()
    for _ in islice(steps, number):
        pass
    mx.synchronize()
    return 1000 * (time.perf_counter() - began) / number


def compare(
    draws: list[SamplingParams], logits: list[mx.array], rounds: int, steps: int
) -> tuple[list[float], list[float]]:
    """Return the milliseconds per step in each round, ours and upstream's; two steps of each warm up."""
    both = ours(draws, logits), upstreams(draws, logits)
    for side in both:
        step_ms(side, 2)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for side, figures in zip(both, times, strict=True):
            figures.append(step_ms(side, steps))
    return times


def _made_logits(rows: int, vocabulary: int, dtype: mx.Dtype) -> list[mx.array]:
    logits = [
        (3 * mx.random.normal((rows, vocabulary), key=mx.random.key(seed))).astype(dtype) for seed in (0, 1)
    ]
    mx.eval(logits)
    return logits


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    return parser.parse_args()


def main() -> None:
    options = _options()
    median: Callable[[list[float]], float] = statistics.median
    print(f"{options.vocabulary} tokens, {options.dtype}, {options.rounds} rounds of {options.steps} steps")
    print(f"{'ms per step':<24}{'rows':>5}{'ours':>10}{'upstream':>10}{'ratio':>8}{'least':>8}{'most':>8}")
    for rows in options.rows:
        logits = _made_logits(rows, options.vocabulary, getattr(mx, options.dtype))
        for name, draws in SETTINGS.items():
            mine, theirs = compare(list(islice(cycle(draws), rows)), logits, options.rounds, options.steps)
            ratios = [their / my for my, their in zip(mine, theirs, strict=True)]
            figures = f"{median(mine):>10.2f}{median(theirs):>10.2f}{median(ratios):>8.1f}"
            print(f"{name:<24}{rows:>5}{figures}{min(ratios):>8.1f}{max(ratios):>8.1f}", flush=True)


if __name__ == "__main__":
    main()
