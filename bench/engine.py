"""The worker's decode loop in process, next to upstream's, with the same models, prompts and BLAS.

    python -m bench.engine [--models dense,hybrid] [--batches 1,4,16,32] [--rounds 5] [--only decode,mixed]

`ours` is the worker's complete loop: scheduler, engine, detokenizer, messages. `bare` is the upper bound: the
model on upstream's caches, argmax, one step ahead. The sides take turns within each round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.timing import compare, median_rate, print_table
from worker.process.preload import preload_openblas

if TYPE_CHECKING:
    from bench.cases import Line

SIDES = ("bare", "ours", "BatchGenerator", "stream_generate")
CASES = ("decode", "mixed", "sampled")
LEGEND = (
    "Columns: tokens/s of each side, median of {rounds} rounds; then the ratio of ours to each, median of "
    "the ratios of the rounds (smallest-largest). {aim}"
)


def report(title: str, lines: Sequence[Line], rounds: int, aim: str) -> None:
    """Print one table for one kind of case."""
    sides = [side for side in SIDES if any(side in line.done for line in lines)]
    others = [side for side in sides if side != "ours"]
    rows = []
    for line in lines:
        rates = [f"{median_rate(line.done[side]):,.0f}" if side in line.done else "" for side in sides]
        ratios = [
            str(compare(line.done["ours"], line.done[side])) if side in line.done else "" for side in others
        ]
        rows.append([line.case, *rates, *ratios])
    columns = ["", *sides, *(f"ours/{side}" for side in others)]
    print_table(title, columns, rows, LEGEND.format(rounds=rounds, aim=aim))


def run(models: Sequence[str], batches: Sequence[int], rounds: int, only: Sequence[str]) -> None:
    """Run each kind of case and print its table as soon as it is complete."""
    from bench import cases

    if "decode" in only or "mixed" in only:
        benches = [cases.Bench(name) for name in models]
        if "decode" in only:
            lines = [cases.decode(bench, rows, rounds) for bench in benches for rows in batches]
            report("Steady greedy decode", lines, rounds, "Aims: 0.97 of bare; never below the other two.")
        if "mixed" in only:
            lines = [cases.mixed(bench, rows, rounds) for bench in benches for rows in batches]
            report("Decode with prefill mixed in", lines, rounds, "Aim: never below the other two.")
    if "sampled" in only:
        bench = cases.Bench("wide")
        settings = {"filters": cases.FILTERS, "filters, penalties, bias": cases.PENALTIES}
        lines = [cases.sampled(bench, draws, what, rounds) for what, draws in settings.items()]
        report(
            "Sampled, 16 rows, 152k vocabulary", lines, rounds, "Aim: twice BatchGenerator. Bare is greedy."
        )


def main() -> None:
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="dense,hybrid", help="of dense, hybrid")
    parser.add_argument("--batches", default="1,4,16,32", help="rows that decode together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    batches = [int(rows) for rows in options.batches.split(",")]
    run(options.models.split(","), batches, options.rounds, options.only.split(","))


if __name__ == "__main__":
    main()
