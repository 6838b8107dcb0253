"""Decoding with a part of the experts in memory, beside all of them: a random mixture, of which the others
are read from disk.

    python -m bench.experts [--rows 1 4] [--shares 0.25 0.5 0.75] [--rounds 5] [--cold]

`waiting` has a slot for every expert, so it shows what waiting for each router's choice costs. The router is
random: it chooses nearly all experts alike, which is close to the worst case. Reads come from the system's
page cache; with `--cold` it is emptied of the model's file before each turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from bench.timing import Work, alternate, compare, median_rate, print_table, timed
from protocol.common.expert_plan import plan_all
from tests.models.mixtures import make_mixture
from worker.load.experts import attach
from worker.runner.experts import ExpertMemory
from worker.runner.runner import BatchEngine
from worker.values import SamplingParams

PROMPT_TOKENS = 64
STEPS = 24
_LEGEND = (
    "over all in memory: tokens/s relative to it, median of the rounds (smallest-largest). hits: wanted"
    " experts that were in memory. read: per token."
)


def opened(folder: Path, share: float) -> tuple[BatchEngine, ExpertMemory | None]:
    """Open the model with a share of its experts in memory; 0: as upstream does, without slabs."""
    network: Any = load_model(folder, lazy=True)[0]
    memory = None
    if share:
        plan = plan_all(sorted(folder.glob("model*.safetensors")))
        memory = attach(replace(plan, slots=max(1, round(share * plan.experts))), network)
    mx.eval(network.parameters())
    return BatchEngine(network), memory


def decode(engine: BatchEngine, rows: int, before: Callable[[], None]) -> Work:
    """Time `STEPS` decode steps of rows with different prompts."""
    before()
    for row in range(rows):
        prompt = [(31 * place + 7 * row) % 1900 + 1 for place in range(PROMPT_TOKENS)]
        engine.prefill({str(row): prompt[:-1]})
        engine.start(str(row), prompt, len(prompt), SamplingParams())
    engine.step()

    def steps() -> float:
        return sum(len(engine.step().tokens) for _ in range(STEPS))

    work = timed(steps)
    engine.reset()
    return work


def forget(file: Path) -> None:
    """Drop a file from the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, shares: Sequence[float], rows: Sequence[int], rounds: int, *, cold: bool) -> None:
    """Print a table for each number of rows."""
    named = {"all in memory": 0.0, "waiting": 1.0} | {f"{share:.0%} in memory": share for share in shares}
    sides = {name: opened(folder, share) for name, share in named.items()}
    before = partial(forget, folder / "model.safetensors") if cold else (lambda: None)
    for count in rows:
        done = alternate(
            {name: partial(decode, engine, count, before) for name, (engine, _) in sides.items()}, rounds
        )
        lines = [
            [
                name,
                f"{median_rate(done[name]):.1f}",
                str(compare(done[name], done["all in memory"])),
                *_reads(memory, (rounds + 1) * STEPS * count),
            ]
            for name, (_, memory) in sides.items()
        ]
        columns = ["", "tokens/s", "over all in memory", "hits", "read, MB"]
        print_table(f"{count} rows", columns, lines, _LEGEND)


def _reads(memory: ExpertMemory | None, tokens: int) -> list[str]:
    if memory is None:
        return ["", ""]
    counters = memory.counters
    hits, megabytes = 1 - counters.read / counters.wanted, counters.read_bytes / tokens / 1e6
    counters.wanted = counters.read = counters.read_bytes = 0
    return [f"{hits:.0%}", f"{megabytes:.1f}"]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.experts", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512, help="hidden size of an expert")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each turn")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = make_mixture(
            "qwen3_moe",
            Path(home) / "mixture",
            experts=asked.experts,
            layers=asked.layers,
            hidden_size=256,
            moe_intermediate_size=asked.width,
        )
        measure(folder, asked.shares, asked.rows, asked.rounds, cold=asked.cold)


if __name__ == "__main__":
    main()
