"""Pauses of streams after `kill -9`, for a model that runs as two processes, next to one process, in turns.

    python -m bench.setpauses [--kills 8] [--model dense] [--sides alone,spare,set]

Three `serve` with the same model: one process, one process with a spare, and a set of two ranks over the ring
on loopback. A process is killed while sixteen greedy streams are running; of the set each rank in turn. The
pause of a stream is the time between its last text before the kill and its first text from the next worker;
all texts must equal those of an undisturbed run. Then where the time goes: until the gateway hears from the
next worker, until that worker is ready, and the phases of its start, as it reports them. For a set also, from
its log, until its other ranks have connected, and have loaded and probed their parts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.models import bench_folder
from bench.pauses import KILL_AFTER_S_MAX, Side, pauses_after, serving, streaming
from bench.processes import socket_folder, wait_until
from bench.timing import print_table
from deploy.load.samples import percentile
from tests.ports import free_ports

RANKS = 2
SIDES = "alone", "spare", "set"
LOOK_S = 0.02
STEPS = "connected", "ready", "first text", "last text"
MILESTONES = {"other ranks there": " has connected: ", "joined, read and tried": " follows"}
"""Milestones of a set, and the text that its log contains for each."""


@dataclass
class Case:
    """One side and its results, in seconds since each kill."""

    name: str
    side: Side
    heard: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of the new worker, with its other ranks, until all streams have resumed."""

    milestones: dict[str, list[float]] = field(default_factory=dict)

    @property
    def steps(self) -> list[list[float]]:
        """Results in the order of `STEPS`."""
        return [self.heard, self.ready, self.first, self.last]


@contextlib.contextmanager
def opened(name: str, model: Path) -> Iterator[Case]:
    """Run a `serve` that is ready."""
    flags = [f"--model={model}"]
    with socket_folder() as folder:
        if name == "set":
            hosts = folder / "hosts.json"
            hosts.write_text(
                json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * RANKS), encoding="utf-8"
            )
            flags += [f"--hosts={hosts}", "--split=tensor", f"--hosts-port={free_ports(RANKS)[0]}"]
            flags += ["--log-format=json"]
        with serving(int(name == "spare"), 1, flags, folder) as (side, _):
            yield Case(name, side)


async def kill(case: Case, rank: int, dice: random.Random) -> None:
    """Kill one rank, or the only process."""
    side = case.side
    side.wait_for_spare()
    worker = psutil.Process(side.worker()["pid"])
    struck = worker.children()[rank - 1] if rank and case.name == "set" else worker
    async with streaming(side) as answers:
        await asyncio.sleep(dice.uniform(0, KILL_AFTER_S_MAX))
        at, clock = time.perf_counter(), time.time()
        struck.kill()
        said = {id(answer): len(answer.pieces) for answer in answers if not answer.tokens}
        struck_by = [answer for answer in answers if id(answer) in said]
        new = await asyncio.to_thread(_watch, case, worker.pid, at)
        while any(  # noqa: ASYNC110 - any of several
            len(answer.pieces) <= said[id(answer)] and not answer.tokens for answer in struck_by
        ):
            await asyncio.sleep(LOOK_S)
        case.cpu_s.append(_cpu_s(new))
    side.pauses += pauses_after(struck_by, at)
    resumed = [
        max(itertools.pairwise(answer.pieces), key=lambda pair: pair[1] - pair[0])[1] for answer in struck_by
    ]
    if case.name == "set":
        for name, words in MILESTONES.items():
            case.milestones.setdefault(name, []).append(_logged(side.log, words, clock) - clock)
    case.first.append(min(resumed) - at)
    case.last.append(max(resumed) - at)
    side.parts.append(side.worker()["start_s"])


def _watch(case: Case, old: int, at: float) -> int:
    """Wait until another worker is ready, and return its process id."""
    seen: dict[str, tuple[int, float]] = {}

    def is_there() -> bool:
        for worker in case.side.status()["workers"]:
            if worker["pid"] != old:
                seen.setdefault(worker["state"], (worker["pid"], time.perf_counter() - at))
        return "ready" in seen

    wait_until(is_there, f"no other worker was ready: {case.side.log}")
    pid, ready = seen["ready"]
    case.heard.append(min(seconds for _, seconds in seen.values()))
    case.ready.append(ready)
    return pid


def _logged(log: Path, words: str, since: float) -> float:
    """Return the time of the first log line after `since` that contains `words`."""
    lines = (json.loads(line) for line in log.read_text(encoding="utf-8").split("\n") if line.startswith("{"))
    return next(line["time"] for line in lines if line["time"] > since and words in line["message"])


def _cpu_s(pid: int) -> float:
    first = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (first, *first.children(recursive=True)))


async def run(cases: Sequence[Case], kills: int) -> None:
    dice = random.Random(1)
    for case in cases:
        async with streaming(case.side):  # these texts are the reference
            pass
    for number in range(kills):
        for case in cases if number % 2 else [*reversed(cases)]:
            await kill(case, number % RANKS, dice)
            print(f"kill {number + 1}: {case.name} {case.last[-1]:.1f} s", file=sys.stderr, flush=True)


def report(cases: Sequence[Case]) -> None:
    base = statistics.median(cases[0].side.pauses)
    rows = [
        [
            case.name,
            f"{1000 * statistics.median(case.side.pauses):,.0f}",
            *(f"{1000 * percentile(case.side.pauses, each):,.0f}" for each in (90, 100)),
            f"{statistics.median(case.side.pauses) / base:.2f}",
            f"{statistics.median(case.cpu_s):.1f}",
        ]
        for case in cases
    ]
    wrong = ", ".join(f"{case.name} {case.side.wrong}" for case in cases)
    legend = f"Milliseconds. {len(cases[0].ready)} kills of each; wrong or failed: {wrong}."
    columns = ["", "median", "p90", "most", f"over {cases[0].name}", "CPU s of the next worker"]
    print_table("Pauses of 16 streams", columns, rows, legend)
    rows = [[case.name, *(f"{1000 * statistics.median(each):,.0f}" for each in case.steps)] for case in cases]
    print_table("From a kill until", ["", *STEPS], rows, "Medians in milliseconds.")
    for case in cases:
        told = [f"{name} {1000 * statistics.median(found):,.0f}" for name, found in case.milestones.items()]
        if told:
            print(f"From a kill until, {case.name}: {', '.join(told)}\n")
    names = list(dict.fromkeys(name for case in cases for parts in case.side.parts for name in parts))
    rows = [[name, *(_part(case.side, name) for case in cases)] for name in names]
    print_table("Phases of a start", ["", *(case.name for case in cases)], rows, "Medians in milliseconds.")


def _part(side: Side, name: str) -> str:
    return f"{1000 * statistics.median([parts.get(name, 0.0) for parts in side.parts]):,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--model", default="dense")
    parser.add_argument("--sides", default=",".join(SIDES))
    asked = parser.parse_args(arguments)
    model = bench_folder(asked.model)
    with contextlib.ExitStack() as stack:
        cases = [stack.enter_context(opened(name, model)) for name in asked.sides.split(",")]
        asyncio.run(run(cases, asked.kills))
        report(cases)


if __name__ == "__main__":
    main()
