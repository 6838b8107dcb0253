"""What sampling costs a decode step: our sampler next to upstream's batch, on the same logits.

    python -m bench.sampling [--vocabulary 151936] [--rows 1 4 16] [--rounds 7] [--steps 3] [--dtype float32]

Upstream is `mlx_lm.generate.GenerationBatch` itself over a model that returns logits made beforehand, with
`make_sampler` and `make_logits_processors` for each row, as its server makes them. Both are double-buffered
and read each step's tokens. They take turns, so that a noisy machine troubles both. Upstream draws without
a seed for each row and penalizes the last 20 tokens only, where ours goes by (seed, position) and all tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle, islice
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

from worker.contract import Draw
from worker.engine.sampling.row import Row
from worker.engine.sampling.sampler import Sampler

PROMPT = list(range(1000, 1200))
MIXED = [
    Draw(temperature=0.6, top_p=0.95, top_k=20),
    Draw(temperature=0.8, repetition_penalty=1.1, top_k=40),
    Draw(temperature=1.0),
    Draw(),
    Draw(temperature=0.7, top_p=0.9),
    Draw(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.3),
    Draw(temperature=1.0, min_p=0.05),
    Draw(repetition_penalty=1.1),
]
SETTINGS = {
    "all greedy": [Draw()],
    "temperature": [Draw(temperature=0.8)],
    "top_p 0.9": [Draw(temperature=0.8, top_p=0.9)],
    "top_k 40": [Draw(temperature=0.8, top_k=40)],
    "top_p 0.95, top_k 20": MIXED[:1],
    "min_p 0.05": [Draw(temperature=0.8, min_p=0.05)],
    "penalties": [Draw(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.3)],
    "mixed": MIXED,
}

Steps = Iterator[Any]


def ours(draws: list[Draw], logits: list[mx.array]) -> Steps:
    """One step for each item: dispatches the next tokens, then reads those before."""
    sampler = Sampler([Row(replace(draw, seed=seed), PROMPT, len(PROMPT)) for seed, draw in enumerate(draws)])
    pending = None
    for position, batch in zip(count(len(PROMPT)), cycle(logits), strict=False):
        sampled = sampler(batch, [position] * len(draws))
        mx.async_eval(sampled.tokens, sampled.arrays)
        yield pending.tokens.tolist() if pending else None
        pending = sampled


def upstreams(draws: list[Draw], logits: list[mx.array]) -> Steps:
    """The same of upstream's batch."""
    batches = cycle(logits)
    batch = GenerationBatch(
        model=lambda inputs, cache: next(batches)[:, None],
        uids=list(range(len(draws))),
        inputs=mx.zeros(len(draws), mx.uint32),
        prompt_cache=[],
        tokens=[list(PROMPT) for _ in draws],
        samplers=[make_sampler(draw.temperature, draw.top_p, draw.min_p, top_k=draw.top_k) for draw in draws],
        fallback_sampler=greedy_sampler,
        logits_processors=[
            make_logits_processors(
                repetition_penalty=draw.repetition_penalty if draw.repetition_penalty != 1 else None,
                presence_penalty=draw.presence_penalty or None,
                frequency_penalty=draw.frequency_penalty or None,
            )
            for draw in draws
        ],
        stop_sequences=[StopSequences([]) for _ in draws],
        max_tokens=[2**62] * len(draws),
    )
    while True:
        yield batch.next()


def step_ms(steps: Steps, number: int) -> float:
    """Milliseconds a step, over `number` of them. Nothing of it is left for the other side's turn."""
    began = time.perf_counter()
    for _ in islice(steps, number):
        pass
    mx.synchronize()
    return 1000 * (time.perf_counter() - began) / number


def compare(
    draws: list[Draw], logits: list[mx.array], rounds: int, steps: int
) -> tuple[list[float], list[float]]:
    """Milliseconds a step in each round, of ours and of upstream's; two steps of each warm up."""
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
    print(f"{'ms a step':<24}{'rows':>5}{'ours':>10}{'upstream':>10}{'ratio':>8}{'least':>8}{'most':>8}")
    for rows in options.rows:
        logits = _made_logits(rows, options.vocabulary, getattr(mx, options.dtype))
        for name, draws in SETTINGS.items():
            mine, theirs = compare(list(islice(cycle(draws), rows)), logits, options.rounds, options.steps)
            ratios = [their / my for my, their in zip(mine, theirs, strict=True)]
            figures = f"{median(mine):>10.2f}{median(theirs):>10.2f}{median(ratios):>8.1f}"
            print(f"{name:<24}{rows:>5}{figures}{min(ratios):>8.1f}{max(ratios):>8.1f}", flush=True)


if __name__ == "__main__":
    main()
