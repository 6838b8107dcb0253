"""Cost of grammars: decode steps with some rows constrained by JSON schemas, next to unconstrained rows.

    python -m bench.grammars [--hidden 32] [--layers 2] [--rows 16] [--held 1 8 16] [--steps 2] [--rounds 60]
        [--cpu]

Steps of the engine alone, at a vocabulary of 151,936 tokens, so that nothing hides the time of the masks. The
sides take turns within each round. `--held`: how many of the rows are constrained. All rows decode in one
batch, so unconstrained rows are as fast as the others. The model has random weights: it answers whatever its
schema allows, and when an answer is complete its row begins another. The model's size determines the time of
a step; the cost of grammars depends on the vocabulary alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench.timing import Measure, Work, alternate, compare, median_rate, print_table
from deploy.load.samples import percentile
from worker.process.preload import preload_openblas

if TYPE_CHECKING:
    from bench.schemas import SchemaGrammar
    from worker.runner.runner import BatchEngine
    from worker.values import SamplingParams

PROMPT_TOKENS = 126
HEAD = 32
LEGEND = "Medians of the rounds; ratio: tokens/s over those without grammars, round by round."


def network(hidden: int, layers: int) -> object:
    """Return a model of that size with random float32 weights."""
    import mlx.core as mx
    from mlx_lm.models import qwen3

    from bench.models import VOCABULARY_WIDE

    arguments = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=max(1, hidden // HEAD),
        num_key_value_heads=max(1, hidden // HEAD // 2),
        rms_norm_eps=1e-6,
        vocab_size=VOCABULARY_WIDE,
        max_position_embeddings=32_768,
        rope_theta=10_000.0,
        head_dim=HEAD,
        tie_word_embeddings=True,
    )
    mx.random.seed(0)
    model = qwen3.Model(arguments)
    mx.eval(model.parameters())
    return model


def started(network: object, draws: Sequence[SamplingParams]) -> BatchEngine:
    """Return an engine whose rows decode, past their first steps."""
    import mlx.nn as nn

    from bench.models import random_tokens
    from worker.runner.runner import BatchEngine

    assert isinstance(network, nn.Module)
    engine = BatchEngine(network)
    for row, sampling in enumerate(draws):
        prompt = random_tokens(PROMPT_TOKENS, row)
        engine.prefill({str(row): prompt[:-1]})
        engine.start(str(row), prompt, len(prompt), sampling)
    for _ in range(3):
        engine.step()
    return engine


def decoded(engine: BatchEngine, steps: int, clock: Callable[[], float]) -> Work:
    """Measure the tokens of `steps` steps, including the work that they have dispatched."""
    import mlx.core as mx

    began = clock()
    done = sum(len(engine.step().tokens) for _ in range(steps))
    mx.synchronize()
    return Work(done, clock() - began)


def draws_of(
    rows: int, held: int, grammars: Sequence[SchemaGrammar], temperature: float
) -> list[SamplingParams]:
    """Return the sampling parameters of `rows` rows, the last `held` of them constrained."""
    from worker.values import SamplingParams

    return [
        SamplingParams(
            seed=row, temperature=temperature, grammar=grammars[row] if row >= rows - held else None
        )
        for row in range(rows)
    ]


def report(title: str, done: dict[str, list[Work]], rows: int, masks: Sequence[float]) -> None:
    """Print one table, and the times of the masks."""
    lines = []
    for held, work in done.items():
        rate = median_rate(work)
        ms = f"{1000 * rows / rate:.1f}"
        lines.append([f"{held} of {rows}", ms, f"{rate:,.0f}", str(compare(work, done["0"]))])
    print_table(title, ["constrained", "ms per step", "tokens/s", "ratio"], lines, LEGEND)
    median, p99 = statistics.median(masks), percentile(masks, 99)
    print(f"{len(masks)} masks: {median:.0f} µs at the median, {p99:.0f} at p99\n", flush=True)


def run(options: argparse.Namespace) -> None:
    """Print a table for greedy rows and one for sampled rows, each as soon as it is complete."""
    from bench.schemas import Costs, SchemaGrammar, random_schema, wide_tokenizer

    clock = time.process_time if options.cpu else time.perf_counter
    model, tokenizer, costs = network(options.hidden, options.layers), wide_tokenizer(), Costs()
    grammars = [SchemaGrammar(tokenizer, random_schema(seed), costs) for seed in range(options.rows)]
    for temperature in (0.0, 1.0):
        sides: dict[str, Measure] = {}
        for held in (0, *options.held):
            engine = started(model, draws_of(options.rows, held, grammars, temperature))
            sides[str(held)] = partial(decoded, engine, options.steps, clock)
        costs.masks.clear()
        done = alternate(sides, options.rounds)
        title = f"{options.hidden} wide, {options.layers} layers, temperature {temperature}"
        report(title, done, options.rows, costs.masks)


def main() -> None:
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=32, help="a multiple of 64, or 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--held", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time, for a busy machine")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
