"""Cost of a decode step of a model split over two processes of this machine, relative to one process.

    python -m bench.ranks [--rounds 5] [--steps 60] [--idle 10]

Both sides are engines as the worker's loop uses them, `set` over the ring on loopback: dense models by tensor
parallelism, hybrid ones in a pipeline. The sides take turns within each round; wall-clock and CPU seconds of
all processes of a side are measured. Two ranks of one machine share its cores, so this shows the overhead of
a step, not what several machines gain. Finally, the share of a core that each rank of an idle set uses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from bench.models import bench_folder, random_tokens
from bench.timing import Work, compare, print_table
from worker.process.preload import preload_openblas

MODES: dict[str, Literal["tensor", "pipeline"]] = {
    "dense": "tensor",
    "dense-1024": "tensor",
    "hybrid": "pipeline",
    "hybrid-1024": "pipeline",
}
ROWS = (1, 8)
PROMPT_TOKENS = 32
WARM_STEPS = 5
WAIT_S = 300.0


class Side:
    """A process with the model, alone or as the first rank of a set, that runs steps on command."""

    def __init__(self, model: str, ranks: int) -> None:
        command = [sys.executable, "-m", "bench.ranks", "--side", model, "--ranks", str(ranks)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        self._hear()
        own = psutil.Process(self._process.pid)
        self.processes = [own, *own.children(recursive=True)]

    def steps(self, rows: int, steps: int) -> tuple[Work, Work]:
        """Return the wall-clock seconds, and the CPU seconds of all processes."""
        assert self._process.stdin is not None
        before = self.cpu_s()
        print(json.dumps([rows, steps]), file=self._process.stdin, flush=True)
        seconds = self._hear()
        return Work(steps, seconds), Work(steps, sum(self.cpu_s()) - sum(before))

    def cpu_s(self) -> list[float]:
        """Return the CPU seconds of each process so far."""
        return [sum(process.cpu_times()[:2]) for process in self.processes]

    def _hear(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line and not line.startswith("#"):
            line = self._process.stdout.readline()
        assert line, "the side has ended"
        return float(line[1:])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(self.processes, timeout=WAIT_S)


def serve(model: str, ranks: int) -> None:
    """Run one side until its input ends."""
    preload_openblas(sys.argv)
    engine = _engine(str(bench_folder(model)), MODES[model], ranks)
    print("#0", flush=True)
    for line in sys.stdin:
        rows, steps = json.loads(line)
        print(f"#{_run(engine, rows, steps)}", flush=True)
    os._exit(0)


def _engine(folder: str, mode: Literal["tensor", "pipeline"], ranks: int) -> Any:
    if ranks == 1:
        from worker.interfaces import Model
        from worker.load.load import ModelLoader

        model = ModelLoader(folder).load(lambda done, total: None)
        assert isinstance(model, Model)
        return model.engine
    from protocol.settings.worker import WorkerSettings
    from tests.ports import free_ports
    from worker.ranks.loader import SetLoader
    from worker.ranks.rendezvous import Rendezvous

    with tempfile.TemporaryDirectory() as home:
        hosts = Path(home) / "hosts.json"
        hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * ranks), encoding="utf-8")
        port = free_ports(ranks)[0]
        settings = WorkerSettings(model=folder, hosts=hosts, hosts_port=port, split=mode)
        return SetLoader(settings, Rendezvous(settings, "ring", None)).load(lambda done, total: None).engine


def _run(engine: Any, rows: int, steps: int) -> float:
    """Return the seconds of `steps` steps, after a warm-up."""
    from worker.values import SamplingParams

    prompts = {str(row): random_tokens(PROMPT_TOKENS, row) for row in range(rows)}
    for row, tokens in prompts.items():
        engine.prefill({row: tokens[:-1]})
        engine.start(row, tokens, len(tokens), SamplingParams())
    for _ in range(WARM_STEPS):
        engine.step()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - began
    engine.reset()
    return seconds


def measure(model: str, rounds: int, steps: int, idle_s: float) -> tuple[list[list[str]], list[float]]:
    """Return rows of the table, and the share of a core that each rank uses when idle."""
    sides = {"alone": Side(model, 1), "set": Side(model, 2)}
    table = []
    try:
        for rows in ROWS:
            done: dict[str, list[tuple[Work, Work]]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name, side in sides.items():
                    done[name].append(side.steps(rows, steps))
            clock, cpu = (
                compare([pair[which] for pair in done["alone"]], [pair[which] for pair in done["set"]])
                for which in (0, 1)
            )
            fastest = {name: min(1000 / pair[0].rate for pair in pairs) for name, pairs in done.items()}
            times = [f"{fastest[name]:.2f}" for name in sides]
            table.append([model, MODES[model], str(rows), *times, str(clock), str(cpu)])
        before = sides["set"].cpu_s()
        threading.Event().wait(idle_s)
        idle = [(after - early) / idle_s for early, after in zip(before, sides["set"].cpu_s(), strict=True)]
    finally:
        for side in sides.values():
            side.close()
    return table, idle


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("--models", default=",".join(MODES))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.side:
        serve(given.side, given.ranks)
    columns = ["", "split", "rows", "alone, ms", "set, ms", "set/alone", "the same in CPU seconds"]
    legend = f"The fastest of {given.rounds} rounds; ratios: median (and range) of the rounds' ratios."
    for model in given.models.split(","):
        table, idle = measure(model, given.rounds, given.steps, given.idle)
        print_table(f"A step of {model}", columns, table, legend)
        print(f"idle: {', '.join(f'{share:.4f}' for share in idle)} of a core for each process of the set")


if __name__ == "__main__":
    main(sys.argv[1:])
