"""Rows with different adapters in one batch, over the same rows of the base model.

    python -m bench.adapters [--models dense,hybrid] [--rows 16] [--adapters 8] [--ranks 8,16,32]

The engine decodes greedily in process. Sides, which take turns: `base`, rows without adapters; `base again`,
the same once more, for the noise; `loaded`, rows without adapters on a model that has them; `one`, all rows
with the same adapter; `mixed`, rows with different adapters, in turn. The adapters change the attention's
projections of queries and values, or with `--all` every linear layer.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from typing import Any

from bench.timing import Work, alternate, compare, median_rate, print_table, timed
from worker.process.preload import preload_openblas

KEYS = ("self_attn.q_proj", "self_attn.v_proj")
PROMPT_TOKENS = 32
SIDES = ("base", "base again", "loaded", "one", "mixed")
LEGEND = (
    "Columns: tokens/s of each side, median of {rounds} rounds; then each side over base, median of the "
    "ratios of the rounds (smallest-largest). Aim: mixed at least 0.80 of base, loaded as base again."
)


def opened(name: str) -> Any:
    """Return an engine of a benchmarked model; `NAME:4bit`: quantized."""
    import mlx.nn as nn
    from mlx_lm.utils import load_model

    from bench.models import bench_folder
    from worker.runner.runner import BatchEngine

    plain, _, kind = name.partition(":")
    network = load_model(bench_folder(plain))[0]
    if kind == "4bit":
        nn.quantize(network, group_size=64, bits=4)
    return BatchEngine(network)


def adapted(engine: Any, adapters: int, ranks: list[int], *, every: bool) -> list[str]:
    """Add random adapters to an engine; return their names."""
    import mlx.core as mx

    from worker.runner.lora import LayerWeights, kind_of

    names = [f"adapter{number}" for number in range(adapters)]
    for number, name in enumerate(names):
        weights, rank = {}, ranks[number % len(ranks)]
        for path, layer in engine.adapters.layers().items():
            if kind_of(layer) == "linear" and ("layers." in path if every else path.endswith(KEYS)):
                outputs, inputs = layer.weight.shape
                inputs = layer.scales.shape[-1] * layer.group_size if "scales" in layer else inputs
                a, b = mx.random.normal((inputs, rank)), mx.random.normal((rank, outputs))
                weights[path] = LayerWeights(a * inputs**-0.5, b * 0.01, 2.0)
        engine.adapters.add(name, weights)
    return names


def decode(engine: Any, names: list[str], rows: int, steps: int) -> Work:
    """Decode rows, each with the next of the adapters `names` (empty: the base), and time their steps."""
    from worker.values import SamplingParams

    dice = random.Random(0)
    for number in range(rows):
        row, prompt = str(number), [dice.randrange(3, 1900) for _ in range(PROMPT_TOKENS)]
        if names:
            engine.set_adapter(row, names[number % len(names)])
        engine.prefill({row: prompt[:-1]})
        engine.start(row, prompt, len(prompt), SamplingParams())
    for _ in range(3):
        engine.step()
    work = timed(lambda: sum(len(engine.step().tokens) for _ in range(steps)))
    engine.reset()
    return work


def run(name: str, given: argparse.Namespace) -> list[str]:
    """Measure a model; return its line of the table."""
    plain, changed = opened(name), opened(name)
    names = adapted(changed, given.adapters, [int(rank) for rank in given.ranks.split(",")], every=given.all)
    work = {
        "base": (plain, []),
        "base again": (plain, []),
        "loaded": (changed, []),
        "one": (changed, names[:1]),
    }
    work["mixed"] = changed, names
    sides = {side: partial(decode, *work[side], given.rows, given.steps) for side in SIDES}
    done = alternate(sides, given.rounds)
    rates = [f"{median_rate(done[side]):,.0f}" for side in SIDES]
    return [name, *rates, *(str(compare(done[side], done["base"])) for side in SIDES[1:])]


def main() -> None:
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="dense-1024-deep,hybrid-1024")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--ranks", default="8,16,32")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="change every linear layer")
    given = parser.parse_args()
    lines = [run(name, given) for name in given.models.split(",")]
    columns = ["", *SIDES, *(f"{side}/base" for side in SIDES[1:])]
    title = f"{given.rows} rows, {given.adapters} adapters of ranks {given.ranks}"
    print_table(title, columns, lines, LEGEND.format(rounds=given.rounds))


if __name__ == "__main__":
    main()
