"""Throughput with speculative decoding over throughput without it, where drafts help and where they do not.

    python -m bench.drafts [--models dense,hybrid] [--batches 1,4,16] [--rounds 5] [--cases …] [--columns]

A model with random weights copies nothing, so its answer is generated first, with seeds, and put into the
prompt like an agent's file. `rewritten`: the answer repeats it with an edit at regular intervals, as an agent
rewrites a file of its prompt. `own`: the answer does not resemble its prompt. `misled`: whatever three tokens
end the answer, a different token followed them before. `strict`: the answer is constrained by a JSON schema.
`--columns`: the time of a forward pass with several tokens a row relative to a plain one.

Each case is measured twice: by wall-clock time and by the CPU time of the process, which is more reliable on
a busy machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from bench.timing import Work, alternate, compare, median_rate, print_table
from worker.process.preload import preload_openblas

if TYPE_CHECKING:
    from bench.drafted import Case, Drafted

CASES = ("rewritten", "own", "misled", "strict")
COLUMNS = (1, 2, 4, 8, 16)
LEGEND = (
    "Tokens/s without and with drafts, median of {rounds} rounds; their ratio, median of the ratios of "
    "the rounds (smallest-largest), by wall-clock and by CPU time; tokens per pass; accepted draft tokens of "
    "all."
)


class Watch:
    """Work of one side, measured by two clocks at once."""

    def __init__(self, side: Drafted, case: Case) -> None:
        self.side = side
        self.by_processor: list[Work] = []
        self._case = case

    def measure(self) -> Work:
        """Run one round, with its prompts prefilled beforehand."""
        self.side.begin(self._case)
        wall, own = time.perf_counter(), time.process_time()
        done = self.side.run()
        own, wall = time.process_time() - own, time.perf_counter() - wall
        self.by_processor.append(Work(done, own))
        return Work(done, wall)


def compared(name: str, make: Callable[[bool], Drafted], case: Case, rounds: int) -> list[str]:
    """Measure one row of the table."""
    with ExitStack() as stack:
        off, on = (Watch(stack.enter_context(closing(make(is_on))), case) for is_on in (False, True))
        done = alternate({"off": off.measure, "on": on.measure}, rounds)
        wall = compare(done["on"], done["off"])
        own = compare(on.by_processor[1:], off.by_processor[1:])
        accepted, rejected = on.side.drafted()
        return [
            name,
            *(f"{median_rate(done[side]):,.0f}" for side in ("off", "on")),
            str(wall),
            str(own),
            f"{on.side.tokens_a_pass():.2f}",
            f"{accepted}/{accepted + rejected}",
        ]


def run(models: Sequence[str], batches: Sequence[int], rounds: int, cases: Sequence[str]) -> None:
    from bench.drafted import Drafted, case_of
    from bench.models import bench_folder
    from bench.ours import load

    for model_name in models:
        folder = bench_folder(model_name)
        model = load(folder)
        rows = []
        for kind in cases:
            for batch in batches:
                case = case_of(kind, folder, model, batch)
                name = f"{kind}, {batch} rows"
                rows.append(compared(name, partial(Drafted, model, batch), case, rounds))
                print(*rows[-1], file=sys.stderr, flush=True)
        columns = ("", "off", "auto", "by wall clock", "by CPU time", "tokens a pass", "accepted")
        print_table(f"Drafts, {model_name}", columns, rows, LEGEND.format(rounds=rounds))


def show_columns(models: Sequence[str], batches: Sequence[int], rounds: int) -> None:
    """Print the cost of passes with several tokens a row."""
    from bench.drafted import Passes
    from bench.models import bench_folder

    for name in models:
        passes = Passes(bench_folder(name))
        rows = [[f"{batch} rows", *_ratios(passes, batch, rounds)] for batch in batches]
        legend = "CPU time of a pass with this many tokens a row, over that of a plain pass."
        print_table(f"Columns, {name}", ("", *map(str, COLUMNS)), rows, legend)


def _ratios(passes: object, batch: int, rounds: int) -> Iterator[str]:
    from bench.drafted import Passes

    assert isinstance(passes, Passes)
    sides = {width: passes.feeding(batch, width) for width in (0, *COLUMNS)}
    done = alternate({str(width): side for width, side in sides.items()}, rounds)
    for width in COLUMNS:
        yield f"{1 / compare(done[str(width)], done['0']).median:.2f}"


def main() -> None:
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="dense,hybrid", help="of dense, hybrid")
    parser.add_argument("--batches", default="1,4,16", help="rows that decode in one batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--columns", action="store_true", help="measure only the cost of passes with several tokens a row"
    )
    options = parser.parse_args()
    random.seed(0)
    models, batches = options.models.split(","), [int(rows) for rows in options.batches.split(",")]
    if options.columns:
        show_columns(models, batches, options.rounds)
    else:
        run(models, batches, options.rounds, options.cases.split(","))


if __name__ == "__main__":
    main()
