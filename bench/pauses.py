"""Effect of a worker's crash on its clients, with and without a spare: `--spare 0` and `--spare 1`, in turns.

    python -m bench.pauses [--kills 50] [--reloads 10] [--model FOLDER | --gigabytes 2] [--replicas 2]

The worker is killed with SIGKILL while sixteen greedy streams are running. The pause of a stream is the time
between its last text before the kill and its first text from the next worker; all texts must equal those of
an undisturbed run. With `--replicas` both sides have as many workers, one of them is killed, and the pauses
are those of its streams. A reload is timed from the command to its answer; the longest gap of streams is
measured during another one. Then, with the spare alone, the gaps of streams while a spare is created beside
them, next to calm ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.bulky import write_bulky
from bench.client import Answer, ask, client
from bench.gaps import gaps
from bench.processes import free_port, running, socket_folder, wait_for, wait_until
from bench.rivals import Server
from bench.timing import print_table
from deploy.load.samples import percentile

STREAMS = 16
TOKENS = 160
UNDERWAY_PIECES = 8
KILL_AFTER_S_MAX = 1.0
"""Maximum seconds between the point when all streams are running and the kill."""
CALM_S = 6.0
THERE = "spare is ready as pid "
SIDES = (0, 1)


@dataclass
class Side:
    """A `serve` and its results. Times are in seconds."""

    spare: int
    replicas: int
    server: Server
    process: psutil.Process
    log: Path
    environ: dict[str, str]
    pauses: list[float] = field(default_factory=list)
    reloads: list[float] = field(default_factory=list)
    reload_pauses: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    """Phases of each worker's start that followed a kill."""
    texts: list[str] = field(default_factory=list)
    """The texts of an undisturbed run."""
    wrong: int = 0

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.server.url}/v1/status", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def ready(self) -> list[dict[str, Any]]:
        return [each for each in self.status()["workers"] if each["state"] == "ready"]

    def worker(self) -> dict[str, Any]:
        """Return the ready worker that came last. Raises `IndexError` if there is none."""
        return self.ready()[-1]

    def there(self) -> int | None:
        """Return the process id of the waiting spare, or None."""
        found = [
            line.split()[-1] for line in self.log.read_text(encoding="utf-8").splitlines() if THERE in line
        ]
        last = int(found[-1]) if found else None
        serving = {worker["pid"] for worker in self.status()["workers"]}
        return last if last and psutil.pid_exists(last) and last not in serving else None

    def wait_for_spare(self) -> None:
        """Wait for all workers, and for the spare if there is to be one."""
        wait_until(lambda: len(self.ready()) == self.replicas, "not all workers were ready")
        wait_until(lambda: not self.spare or self.there() is not None, f"no spare: {self.log}")


def prompts() -> list[str]:
    return [f"Count from {number} to 90." for number in range(STREAMS)]


@contextlib.asynccontextmanager
async def streaming(side: Side) -> Any:
    """Run sixteen streams, all under way; on leaving the context they are read to their ends and checked."""
    answers = [Answer(underway_pieces=UNDERWAY_PIECES) for _ in range(STREAMS)]
    async with client(side.server) as http:
        asked = [
            asyncio.create_task(ask(http, side.server, prompt, TOKENS, answer, ignore_eos=True))
            for prompt, answer in zip(prompts(), answers, strict=True)
        ]
        try:
            for answer in answers:
                await answer.underway.wait()
            yield answers
        finally:
            for result in await asyncio.gather(*asked, return_exceptions=True):
                side.wrong += isinstance(result, BaseException)
    texts = [answer.text for answer in answers]
    side.texts = side.texts or texts
    side.wrong += sum(text != right for text, right in zip(texts, side.texts, strict=True))


def pauses_after(answers: Sequence[Answer], at: float, grounded: int | None = None) -> list[float]:
    """Return the longest gap after `at` of each stream. `grounded`: only of this many, those with the
    longest."""
    found = [max(gaps(answer.pieces, at, answer.pieces[-1]), default=0.0) for answer in answers]
    return sorted(found, reverse=True)[:grounded]


async def kill(side: Side, dice: random.Random) -> None:
    """Kill one worker under streams."""
    side.wait_for_spare()
    killed = side.worker()["pid"]
    before = _grounded(side)
    async with streaming(side) as answers:
        await asyncio.sleep(dice.uniform(0, KILL_AFTER_S_MAX))
        at = time.perf_counter()
        os.kill(killed, 9)
    side.pauses += pauses_after(answers, at, _grounded(side) - before)
    side.wait_for_spare()
    side.parts.append(side.worker()["start_s"])


def _grounded(side: Side) -> int:
    """Return the number of streams that have lost a worker so far."""
    return int(side.status()["gateway"]["failover"].get("grounded", 0))


async def reload(side: Side, port: str) -> None:
    """Reload once without load, for its duration, and once under streams, for their pauses."""
    side.wait_for_spare()
    side.reloads.append(await _ordered(side, port))
    side.wait_for_spare()
    async with streaming(side) as answers:
        at = time.perf_counter()
        await _ordered(side, port)
    side.reload_pauses += pauses_after(answers, at)


async def _ordered(side: Side, port: str) -> float:
    """Run `roundhouse reload` and return its seconds."""
    at = time.perf_counter()
    command = [sys.executable, "-m", "deploy", "reload", f"--port={port}"]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **side.environ}, stdout=subprocess.DEVNULL
    )
    side.wrong += await process.wait() != 0
    return time.perf_counter() - at


async def make_one_beside(side: Side) -> tuple[list[float], list[float], float]:
    """Return gaps of calm streams, gaps of streams while a spare is created, and the seconds that this
    took."""
    side.wait_for_spare()
    async with streaming(side) as answers:
        began = time.perf_counter()
        await asyncio.sleep(1.5)
        calm_until = time.perf_counter()
    calm = [gap for answer in answers for gap in gaps(answer.pieces, began, calm_until)]
    async with streaming(side) as answers:
        spare = side.there()
        assert spare is not None
        at = time.perf_counter()
        os.kill(spare, 9)
        while side.there() in (None, spare) and time.perf_counter() - at < CALM_S:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.05)
        until = time.perf_counter()
    troubled = [gap for answer in answers for gap in gaps(answer.pieces, at, until)]
    return calm, troubled, until - at


@contextlib.contextmanager
def serving(spare: int, replicas: int, model: Sequence[str], folder: Path) -> Iterator[tuple[Side, str]]:
    """Run a `serve` with or without a spare; yield it and its port."""
    port = free_port()
    flags = [
        f"--port={port}",
        f"--spare={spare}",
        f"--replicas={replicas}",
        "--deaths-max=1000000",
        "--prefix-cache-disk=0",
        *model,
    ]
    nothing_said = {name: "" for name in os.environ if name.startswith("ROUNDHOUSE_")}
    environ = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder), **nothing_said}
    log = folder / f"serve-{spare}.log"
    with running("deploy", ["serve", *flags], environ, log=log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/ready", process)
        yield Side(spare, replicas, Server("roundhouse", url, process), process, log, environ), str(port)


async def run(sides: Sequence[Side], ports: Sequence[str], kills: int, reloads: int) -> None:
    dice = random.Random(1)
    for side in sides:
        async with streaming(side):  # these texts are the reference
            pass
    for number in range(kills):
        for side in sides:
            await kill(side, dice)
        print(f"kill {number + 1} of {kills}", end="\r", file=sys.stderr, flush=True)
    for _ in range(reloads):
        for side, port in zip(sides, ports, strict=True):
            await reload(side, port)


async def beside(side: Side, rounds: int) -> tuple[list[float], list[float], float]:
    """Run `make_one_beside` `rounds` times; return all gaps and the median of the seconds."""
    found = [await make_one_beside(side) for _ in range(rounds)]
    calm = [gap for each in found for gap in each[0]]
    troubled = [gap for each in found for gap in each[1]]
    return calm, troubled, statistics.median([each[2] for each in found] or [0.0])


def _part(side: Side, name: str) -> float:
    return statistics.median([parts.get(name, 0.0) for parts in side.parts])


def _row(name: str, values: Sequence[float]) -> list[str]:
    if not values:
        return [name, *["-"] * 4]
    figures = statistics.median(values), percentile(values, 99), min(values), max(values)
    return [name, *(f"{1000 * value:,.0f}" for value in figures)]


def report(sides: Sequence[Side], calm: Sequence[float], troubled: Sequence[float], took_s: float) -> None:
    rows = []
    for name, part in (("kill -9", "pauses"), ("reload", "reloads"), ("pause in a reload", "reload_pauses")):
        rows += [_row(f"{name}, --spare {side.spare}", getattr(side, part)) for side in sides]
        old, new = (statistics.median(getattr(side, part) or [0.0]) for side in sides)
        rows.append(["", f"{new / old:.2f} times" if old else "-"])
    wrong = " and ".join(str(side.wrong) for side in sides)
    legend = f"Milliseconds. {len(sides[0].parts)} kills of each; wrong or failed: {wrong}."
    print_table("Pauses of 16 streams", ["", "median", "p99", "least", "most"], rows, legend)
    if sides[0].parts:
        _report_parts(sides)
    if calm:
        rows = [_row("calm", calm), _row("while a spare is created", troubled)]
        legend = f"Milliseconds. The spare was ready after {took_s:.1f} s."
        print_table("Gaps of 16 streams", ["", "median", "p99", "least", "most"], rows, legend)
    sides[-1].wait_for_spare()
    if (spare := sides[-1].there()) is not None:
        held = psutil.Process(spare).memory_full_info()
        print(f"The spare uses {held.rss / 1e6:.0f} MB, {held.uss / 1e6:.0f} MB of them private.")


def _report_parts(sides: Sequence[Side]) -> None:
    names = list(dict.fromkeys(itertools.chain(*(parts for side in sides for parts in side.parts))))
    rows = [[name, *(f"{1000 * _part(side, name):,.0f}" for side in sides)] for name in names]
    shares = " and ".join(
        f"{statistics.median(side.pauses) / max(1e-3, _part(side, 'weights')):.2f}" for side in sides
    )
    legend = f"Medians in milliseconds. Ratio of the pause to reading the weights: {shares}."
    print_table("Phases of a start", ["", *(f"--spare {side.spare}" for side in sides)], rows, legend)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--reloads", type=int, default=10)
    parser.add_argument("--made", type=int, default=5, help="spares created beside streams")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--model", help="a model folder (default: the embedded model)")
    parser.add_argument("--gigabytes", type=float, help="size of a model that is generated for this")
    asked = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        folder = asked.model
        if asked.gigabytes:
            folder = str(write_bulky(stack.enter_context(socket_folder()) / "bulky", asked.gigabytes))
        model = [f"--model={folder}"] if folder else []
        folders = [stack.enter_context(socket_folder()) for _ in SIDES]
        served = [
            stack.enter_context(serving(spare, asked.replicas, model, folder))
            for spare, folder in zip(SIDES, folders, strict=True)
        ]
        sides = [side for side, _ in served]
        asyncio.run(run(sides, [port for _, port in served], asked.kills, asked.reloads))
        calm, troubled, took = asyncio.run(beside(sides[-1], asked.made))
        report(sides, calm, troubled, took)


if __name__ == "__main__":
    main()
