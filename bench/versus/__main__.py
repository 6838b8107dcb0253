"""Compare our server with others by all that a client notices, and generate documents from the results.

    python -m bench.versus [--lines throughput,gaps] [--models dense] [--rivals all] [--rounds 3] [--json F]
    python -m bench.versus --lines chats --at 4,16
    python -m bench.versus --documents [--json F]

Results replace those of the same models and lines in the file, after each line, so a long run can be done in
pieces, and an interrupted one loses nothing. `--rivals`: `mlx_lm.server` and `mlx_vlm.server`; `vllm-mlx` and
`rapid-mlx`, each in an environment that is created when it is first named; `all`; or the path of another
checkout of this project, such as that of an earlier commit. With `--documents` nothing
is measured: the README's table and `docs/benchmarks.md` are written from the file.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.models import bench_folder
from bench.rivals import KNOWN, NAMES, is_checkout
from bench.versus import (
    chats,
    deaths,
    documents,
    facts,
    front,
    lengths,
    overload,
    results,
    reuse,
    stalls,
    starts,
    throughput,
)
from bench.versus.results import OURS, Entry
from bench.versus.turns import Task
from recipes.smollm2.__main__ import make_folder
from tests.models.fixtures import model_folder

ROOT = Path(__file__).resolve().parents[2]
JSON = Path(__file__).with_name("results.json")
NO_MODEL = "scripted"
"""Stands for the model in lines that run none."""
SEEING = {"vision": "qwen3_vl-eyes"}
TALKING = {"smollm2": False, "smollm2-4bit": True}
"""The models that talk, and whether they are quantized."""
RANDOM = ("dense", "hybrid", *SEEING)
MODELS = (*RANDOM, *TALKING)
Measure = Callable[[Task], Iterator[list[Entry]]]
LINES: dict[str, tuple[Measure, tuple[str, ...]]] = {
    chats.LINE: (chats.measure, tuple(TALKING)),
    **{line: (partial(lengths.measure, line), ("smollm2",)) for line in lengths.LINES},
    starts.LINE: (starts.measure, tuple(TALKING)),
    throughput.LINE: (throughput.measure, RANDOM),
    reuse.LINE: (reuse.measure, RANDOM),
    stalls.LINE: (stalls.measure, ("dense", "hybrid")),
    overload.LINE: (overload.measure, ("dense",)),
    deaths.LINE: (deaths.measure, ("dense",)),
    front.LINE: (front.measure, (NO_MODEL,)),
}
"""The lines, each with the models that it is measured on."""


BY_CONCURRENCY = {each.LINE: each for each in (chats, starts, throughput)}
"""The lines that are measured at several numbers of concurrent requests."""


def _folder(model: str) -> Path:
    """Return the folder of a model, created on first use. Raises `KeyError`."""
    if model == NO_MODEL:
        return ROOT
    if model in TALKING:
        folder = ROOT / ".venv" / "models" / model
        if not folder.is_dir():
            make_folder(folder, quantized=TALKING[model])
        return folder
    return model_folder(SEEING[model]) if model in SEEING else bench_folder(model)


def planned(lines: Sequence[str], models: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of line and model to measure, in order. Raises `KeyError` for an unknown line."""
    wanted = {*models, NO_MODEL}
    return [(line, model) for line in lines for model in LINES[line][1] if model in wanted]


def measure(
    plan: Sequence[tuple[str, str]],
    names: Sequence[str],
    rounds: int,
    file: Path,
    concurrencies: Sequence[int] = (),
) -> None:
    """Measure the whole plan and save each part when it is complete. `concurrencies`: none stands for all."""
    began, load = datetime.datetime.now(datetime.UTC), os.getloadavg()[0]
    key = began.strftime("%Y%m%dT%H%M%SZ")
    results.load(file)  # an unreadable file raises before anything is measured
    for line, model in plan:
        at = time.monotonic()
        print(f"{line}, {model} …", file=sys.stderr, flush=True)
        task = Task(model, _folder(model), names, rounds, key, model in SEEING, concurrencies)
        for found in LINES[line][0](task):
            run = facts.run(names, rounds, began, load)
            results.save(file, results.merge(results.load(file), key, run, found))
            _tell(found, time.monotonic() - at)


def _tell(found: Sequence[Entry], seconds: float) -> None:
    for entry in found:
        medians = {name: side.median for name, side in entry.sides.items()}
        said = ", ".join(f"{name} {median:,.2f}" for name, median in medians.items() if median is not None)
        print(f"  {entry.key}: {said}", file=sys.stderr)
    for note in dict.fromkeys(f"{n}: {s.note}" for e in found for n, s in e.sides.items() if s.note):
        print(f"  {note}", file=sys.stderr)
    print(f"  {seconds:.0f} s", file=sys.stderr, flush=True)


def _rivals(named: str) -> list[str]:
    found = list(KNOWN[1:]) if named == "all" else [name for name in named.split(",") if name]
    unknown = [name for name in found if name not in KNOWN[1:] and not is_checkout(name)]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(KNOWN[1:])}")
    return found


def _numbers(named: str) -> list[int]:
    return [int(number) for number in named.split(",")]


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def chosen(named: str) -> list[str]:
        found = named.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return found

    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.versus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=_some_of(list(LINES)), default=list(LINES))
    parser.add_argument("--models", type=_some_of(MODELS), default=list(MODELS))
    parser.add_argument("--rivals", type=_rivals, default=list(NAMES[1:]))
    parser.add_argument("--at", type=_numbers, default=(), help="numbers of concurrent requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=JSON)
    parser.add_argument(
        "--documents", action="store_true", help="generate the documents from the file; measure nothing"
    )
    options = parser.parse_args()
    for line in options.lines if options.at else ():
        if line not in BY_CONCURRENCY or not set(options.at) <= set(BY_CONCURRENCY[line].CONCURRENCIES):
            parser.error(f"--at: the line {line} is not measured at {', '.join(map(str, options.at))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the servers end as well
    if options.documents:
        documents.write(results.load(options.json), ROOT)
    else:
        logging.basicConfig(format="  %(message)s", level=logging.WARNING)
        logging.getLogger("bench").setLevel(logging.INFO)
        plan = planned(options.lines, options.models)
        measure(plan, [OURS, *options.rivals], options.rounds, options.json, options.at)


if __name__ == "__main__":
    main()
