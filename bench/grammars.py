"""What grammars cost: decode steps of rows that are each held to a JSON schema of its own, beside free ones.

    python -m bench.grammars [--hidden 32] [--layers 2] [--rows 16] [--held 1 8 16] [--steps 2] [--rounds 60]

All are steps of the engine alone, at a vocabulary of 151,936 tokens: nothing else hides what the masks take.
The sides take turns within each round. `held` of the rows are held to schemas; since all decode together, the
free ones beside them are as fast as they are. The model has random weights: it answers whatever a schema
allows, and when an answer is whole its row begins the next. Its size says how long a step takes; what
grammars add depends on the vocabulary alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench.timing import Measure, Work, alternate, compare, median_rate, percentile, print_table, timed
from worker.preload import preload_openblas

if TYPE_CHECKING:
    from bench.schemas import SchemaGrammar
    from worker.contract import Draw
    from worker.engine.engine import BatchEngine

PROMPT_TOKENS = 126
HEAD = 32
LEGEND = "Medians of the rounds; ratio: of tokens/s over those without grammars, round by round."


def network(hidden: int, layers: int) -> object:
    """A model of that size, random weights, float32."""
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


def started(network: object, draws: Sequence[Draw]) -> BatchEngine:
    """An engine whose rows decode, past their first steps."""
    import mlx.nn as nn

    from bench.models import random_tokens
    from worker.engine.engine import BatchEngine

    assert isinstance(network, nn.Module)
    engine = BatchEngine(network)
    for row, draw in enumerate(draws):
        prompt = random_tokens(PROMPT_TOKENS, row)
        engine.prefill({str(row): prompt[:-1]})
        engine.start(str(row), prompt, len(prompt), draw)
    for _ in range(3):
        engine.step()
    return engine


def decoded(engine: BatchEngine, steps: int) -> Work:
    """The tokens of so many steps, what they have set out to compute included."""
    import mlx.core as mx

    def work() -> int:
        done = sum(len(engine.step().tokens) for _ in range(steps))
        mx.synchronize()
        return done

    return timed(work)


def draws_of(rows: int, held: int, grammars: Sequence[SchemaGrammar], temperature: float) -> list[Draw]:
    """Of so many rows, the last ones held."""
    from worker.contract import Draw

    return [
        Draw(seed=row, temperature=temperature, grammar=grammars[row] if row >= rows - held else None)
        for row in range(rows)
    ]


def report(title: str, done: dict[str, list[Work]], rows: int, masks: Sequence[float]) -> None:
    """One table, and what the masks took."""
    lines = []
    for held, work in done.items():
        rate = median_rate(work)
        ms = f"{1000 * rows / rate:.1f}"
        lines.append([f"{held} of {rows}", ms, f"{rate:,.0f}", str(compare(work, done["0"]))])
    print_table(title, ["held", "ms a step", "tokens/s", "ratio"], lines, LEGEND)
    median, p99 = statistics.median(masks), percentile(masks, 99)
    print(f"{len(masks)} masks: {median:.0f} µs at the median, {p99:.0f} at p99\n", flush=True)


def run(options: argparse.Namespace) -> None:
    """A table for greedy rows and one for sampled ones, each as soon as it is done."""
    from bench.schemas import Costs, SchemaGrammar, random_schema, wide_tokenizer

    model, tokenizer, costs = network(options.hidden, options.layers), wide_tokenizer(), Costs()
    grammars = [SchemaGrammar(tokenizer, random_schema(seed), costs) for seed in range(options.rows)]
    for temperature in (0.0, 1.0):
        sides: dict[str, Measure] = {}
        for held in (0, *options.held):
            engine = started(model, draws_of(options.rows, held, grammars, temperature))
            sides[str(held)] = partial(decoded, engine, options.steps)
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
    run(parser.parse_args())


if __name__ == "__main__":
    main()
