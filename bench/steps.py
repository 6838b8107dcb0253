"""Decode steps of the engine alone, beside those of another checkout and of the bare forward pass.

    python -m bench.steps [--before ../before] [--only steps,drafts,copies] [--models dense,smollm2]

`--before`: a checkout of this project, such as that of an earlier commit; without it there is one side less.
Each side is a process of its own (`bench.stepper`), and they take turns within each round. Steps are of
greedy rows that are prefilled before; a figure is the median of a round's steps. Memory: bytes of the caches
over those of the rows alone, after the first steps; `peak`: at most until then, buffers of passes included.
Drafts: time of the steps between steps with drafts, over that of plain steps. Copies: bytes of keys and
values that are copied while a long prompt is prefilled in chunks, over those of its cache, and while a row
joins or leaves a batch, over those of that row; each is counted in two ways (`bench.stepper.Copies`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.models import bench_folder, random_tokens
from bench.rivals import checkout_environ
from bench.timing import Measure, Work, alternate, compare, print_table

ROOT = Path(__file__).resolve().parents[1]
OURS, BEFORE, BARE = "ours", "before", "bare"
STEPS = {"dense": 60, "smollm2": 20}
"""Steps of each side in a round, by the model."""
PARTS = ("steps", "drafts", "copies")
LONG_CHUNK = 128
BATCH, JOINING_TOKENS = (300, 400, 500, 600, 700, 800, 900, 1000), 450


@dataclass(frozen=True)
class Case:
    """Rows of prompts of `lengths` tokens. `is_even`: all have one length, and so compare with upstream's
    batch."""

    model: str
    name: str
    lengths: Sequence[int]

    @property
    def is_even(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def prompts(self) -> list[list[int]]:
        return [random_tokens(length, seed) for seed, length in enumerate(self.lengths)]

    def __str__(self) -> str:
        return f"{self.model}, {self.name}"


def spread(count: int, least: int, most: int) -> list[int]:
    """Return `count` lengths from `least` to `most`."""
    return [least + (most - least) * number // (count - 1) for number in range(count)]


CASES = (
    Case("smollm2", "8 rows of 40 to 2,000 tokens", (40, 60, 100, 200, 400, 800, 1600, 2000)),
    Case("smollm2", "16 rows of 200", [200] * 16),
    Case("smollm2", "1 row of 200", [200]),
    Case("dense", "16 rows of 20 to 2,800", spread(16, 20, 2800)),
    Case("dense", "16 rows of 100 to 250", spread(16, 100, 250)),
    Case("dense", "16 rows of 126", [126] * 16),
    Case("dense", "1 row of 126", [126]),
)
DRAFTED = (
    Case("dense", "1 row of 126", [126]),
    Case("dense", "16 rows of 126", [126] * 16),
    Case("smollm2", "4 rows of 200", [200] * 4),
)

Send = Callable[..., dict[str, Any]]
"""Sends the name of a command and its arguments to a side, and returns its result."""


@contextmanager
def side(kind: str, model: str, checkout: Path = ROOT) -> Iterator[Send]:
    """Run a side while the context is open."""
    folder = bench_folder(model) if model != "smollm2" else ROOT / ".venv" / "models" / model
    command = [sys.executable, "-P", str(ROOT / "bench" / "stepper.py"), kind, str(folder)]
    environ = os.environ | checkout_environ(checkout)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", env=environ, cwd=checkout
    ) as process:
        reader, writer = process.stdout, process.stdin
        assert reader is not None
        assert writer is not None

        def send(*command: Any) -> dict[str, Any]:
            writer.write(json.dumps(command) + "\n")
            writer.flush()
            result: dict[str, Any] = json.loads(reader.readline() or "{}")
            if process.poll() is not None:
                raise RuntimeError(f"the side of {checkout} has ended")
            return result

        yield send
        writer.close()


def sides(stack: ExitStack, model: str, before: Path | None, *, bare: bool = False) -> dict[str, Send]:
    """Start our side and those to compare with."""
    kinds = {OURS: ("engine", ROOT), **({BEFORE: ("engine", before)} if before else {})}
    kinds |= {BARE: ("bare", ROOT)} if bare else {}
    return {
        name: stack.enter_context(side(kind, model, checkout)) for name, (kind, checkout) in kinds.items()
    }


def _step(send: Send, steps: int) -> Work:
    return Work(1, statistics.median(send("steps", steps)["plain"]))


def steps_of(case: Case, before: Path | None, rounds: int) -> list[str]:
    """Return a row of the table of steps."""
    with ExitStack() as stack:
        up = sides(stack, case.model, before, bare=case.is_even)
        memory = {name: send("open", case.prompts) for name, send in up.items()}
        measures: dict[str, Measure] = {
            name: partial(_step, send, STEPS[case.model]) for name, send in up.items()
        }
        done = alternate(measures, rounds)
    cells = [str(case)]
    for name in (OURS, BEFORE, BARE):
        found = done.get(name)
        cells.append(f"{1000 * statistics.median(work.seconds for work in found):.1f}" if found else "")
    cells.append(str(compare(done[BEFORE], done[OURS])) if BEFORE in done else "")
    cells.append(str(compare(done[OURS], done[BARE])) if BARE in done else "")
    for key in ("memory", "peak"):
        cells.append(" / ".join(f"{memory[name][key]:.2f}" for name in (OURS, BEFORE) if name in memory))
    return cells


def drafts_of(case: Case, before: Path | None, rounds: int) -> list[str]:
    """Return a row of the table of steps between drafts: our median, and the one of `before`."""
    with ExitStack() as stack:
        up = sides(stack, case.model, before)
        ratios: dict[str, list[float]] = {name: [] for name in up}
        for send in up.values():
            send("open", case.prompts)
        for number in range(rounds + 1):
            for name, send in up.items():
                found = send("drafted_steps", STEPS[case.model])
                if number:
                    between, plain = (statistics.median(found[key]) for key in ("between", "plain"))
                    ratios[name].append(between / plain)
    cells = {
        name: f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
        for name, each in ratios.items()
    }
    return [str(case), cells[OURS], cells.get(BEFORE, "")]


def copies(before: Path | None, long_tokens: int) -> list[list[str]]:
    """Return the rows of the table of copied bytes."""
    rows: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        for name, send in sides(stack, "dense-small", before).items():
            long = send("chunks", random_tokens(long_tokens, 0), LONG_CHUNK)
            batch = [random_tokens(length, length) for length in BATCH]
            joins = send("joins", batch, random_tokens(JOINING_TOKENS, 1))
            title = f"a prompt of {long_tokens:,} in chunks of {LONG_CHUNK}"
            found = {f"{title}: {key}": each for key, each in long.items()}
            for key, each in (found | joins).items():
                rows.setdefault(key, {})[name] = f"{each:.2f}"
    return [[key, cells[OURS], cells.get(BEFORE, "")] for key, cells in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--models", default=",".join(STEPS), help=f"of {', '.join(STEPS)}")
    parser.add_argument("--long", type=int, default=32_000, help="tokens of the long prompt of the copies")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    parts, models = options.only.split(","), options.models.split(",")
    if "steps" in parts:
        rows = [steps_of(case, options.before, options.rounds) for case in CASES if case.model in models]
        columns = ["ms", OURS, BEFORE, BARE, "ours/before", "bare/ours", "memory", "peak"]
        print_table("Decode step", columns, rows, f"Medians of {options.rounds} rounds (smallest-largest).")
    if "drafts" in parts:
        rows = [drafts_of(case, options.before, options.rounds) for case in DRAFTED if case.model in models]
        print_table("Step between drafts, over a plain one", ["", OURS, BEFORE], rows, "")
    if "copies" in parts:
        print_table(
            "Bytes copied, over those needed", ["", OURS, BEFORE], copies(options.before, options.long), ""
        )


if __name__ == "__main__":
    main()
