"""Cost of serving: our server over HTTP next to its own engine in process.

    python -m bench.loss [--models dense-small,slow] [--concurrency 16] [--rounds 5] [--tokens 64]

Everything between a client's bytes and the engine counts: gateway, transport, templates, output. The sides
take turns within each round, on the same prompts, no two of which are alike. `nothing stored`: the same
server without a prefix cache, which the engine in process does not have either. The client reads events
without parsing them, since its CPU is taken from the measured machine. CPU: of the side's processes,
including spinning BLAS threads; on a busy machine set `OPENBLAS_NUM_THREADS=1`. A step for 16 rows takes
about 20 ms: of `slow` without OpenBLAS, of `slow-openblas` with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import uvloop

from bench.gateway import Reader, http_request
from bench.inprocess import InProcess, in_process
from bench.models import bench_folder, random_text
from bench.processes import cpu_s, free_port, running, socket_folder, wait_for
from bench.timing import Work, alternate, compare, median_rate, print_table, timed

IN_PROCESS = "in process"
TEXT_TOKENS = 116
"""126 together with the tokens of the template."""
SIDES = {"served": (), "nothing stored": ("--prefix-cache-ram", "0", "--prefix-cache-disk", "0")}
BURSTS = 2
"""Requests of each client in a round."""


@dataclass(frozen=True)
class Turn:
    """One turn of a side: its work, its CPU seconds, and those of the gateway."""

    work: Work
    cpu_s: float
    gateway_s: float


@contextmanager
def server(folder: Path, rows: int, flags: Sequence[str]) -> Iterator[tuple[int, psutil.Process]]:
    """Run `roundhouse serve`; yield its port, and the process that is the parent of its others."""
    port = free_port()
    with socket_folder() as own:
        where = ["--model", str(folder), "--port", str(port), "--endpoint", f"ipc://{own}/line"]
        # A new folder each time: every run sends the same prompts and must not find those of the last run.
        kept = ["--prefix-cache-dir", str(own / "prefixes"), "--max-running", str(rows), "--spare", "0"]
        # On a busy machine a worker is sometimes silent; that must not end a measurement.
        patient = {"ROUNDHOUSE_SILENT_AFTER": "60"}
        command = ["serve", *where, *kept, "--log-level", "warning", *flags]
        with running("deploy", command, patient) as process:
            wait_for(f"http://127.0.0.1:{port}/ready", process)
            yield port, process


async def _burst(port: int, texts: Sequence[str], concurrency: int, max_tokens: int) -> int:
    """Send all `texts`, `concurrency` at once, and return the number of tokens, each in an event of its
    own."""
    waiting, loop = list(reversed(texts)), asyncio.get_running_loop()

    async def take() -> int:
        events = 0
        while waiting:
            done: asyncio.Future[int] = loop.create_future()
            reader = partial(Reader, _request(waiting.pop(), max_tokens), done)
            await loop.create_connection(reader, "127.0.0.1", port)
            events += await done - 2  # the first has the role, the last the reason
        return events

    return sum(await asyncio.gather(*(take() for _ in range(concurrency))))


def _request(text: str, max_tokens: int) -> bytes:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    return http_request("POST /v1/chat/completions", json.dumps(body).encode())


def _cpu_of(process: psutil.Process) -> tuple[float, float]:
    """Return the CPU seconds of all its processes, and those of the gateway."""
    used = {each: cpu_s(each) for each in (process, *process.children(recursive=True))}
    return sum(used.values()), sum(cpu for each, cpu in used.items() if "broker" in each.cmdline())


def _turn(process: psutil.Process, turns: list[Turn], work: Callable[[], Work]) -> Work:
    before, gateway_before = _cpu_of(process)
    done = work()
    after, gateway_after = _cpu_of(process)
    turns.append(Turn(done, after - before, gateway_after - gateway_before))
    return done


@dataclass
class Bench:
    """One model at one concurrency."""

    folder: Path
    concurrency: int
    tokens: int

    def texts(self) -> Iterator[list[str]]:
        """Yield the prompts of each round, the same for every side."""
        count, first = BURSTS * self.concurrency, 0
        while True:
            yield [random_text(self.folder, TEXT_TOKENS, first + number) for number in range(count)]
            first += count

    def served(self, port: int, texts: Iterator[list[str]]) -> Work:
        batch = next(texts)
        return timed(lambda: uvloop.run(_burst(port, batch, self.concurrency, self.tokens)))

    def in_process(self, engine: InProcess, texts: Iterator[list[str]]) -> Work:
        return engine.burst(next(texts), self.concurrency, self.tokens, None)

    def run(self, rounds: int) -> dict[str, tuple[list[Work], list[Turn]]]:
        """Return each side's rounds without the first, and their CPU."""
        with ExitStack() as stack:
            measures: dict[str, Callable[[], Work]] = {}
            turns: dict[str, list[Turn]] = {}
            for name, flags in SIDES.items():
                port, process = stack.enter_context(server(self.folder, self.concurrency, flags))
                work = partial(self.served, port, self.texts())
                measures[name] = partial(_turn, process, turns.setdefault(name, []), work)
            engine = stack.enter_context(in_process(self.folder))
            own = partial(self.in_process, engine, self.texts())
            measures[IN_PROCESS] = partial(_turn, engine.process, turns.setdefault(IN_PROCESS, []), own)
            done = alternate(measures, rounds)
        return {name: (done[name], turns[name][1:]) for name in measures}


def _row(name: str, sides: dict[str, tuple[list[Work], list[Turn]]], concurrency: int) -> list[str]:
    done, turns = sides[name]
    cpu = statistics.median(1e3 * turn.cpu_s / turn.work.amount for turn in turns)
    gateway = statistics.median(1e3 * turn.gateway_s / turn.work.amount for turn in turns)
    step_ms = statistics.median(1e3 * concurrency * work.seconds / work.amount for work in done)
    ratio, more = "", ""
    if name != IN_PROCESS:
        own, own_turns = sides[IN_PROCESS]
        ratio = str(compare(done, own))
        figures = [
            (mine.cpu_s / mine.work.amount) / (other.cpu_s / other.work.amount)
            for mine, other in zip(turns, own_turns, strict=True)
        ]
        more = f"{statistics.median(figures):.2f} ({min(figures):.2f}-{max(figures):.2f})"
    own_cpu = [f"{cpu:.2f}", f"{gateway:.3f}" if gateway else "", more]
    return [name, f"{median_rate(done):,.0f}", f"{step_ms:.1f}", ratio, *own_cpu]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="dense-small,slow")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    for model in options.models.split(","):
        sides = Bench(bench_folder(model), options.concurrency, options.tokens).run(options.rounds)
        print_table(
            f"{model}, {options.concurrency} at once, 126 prompt and {options.tokens} output tokens",
            [
                model,
                "tokens/s",
                "ms per step",
                "over in process",
                "CPU ms/token",
                "gateway",
                "over in process",
            ],
            [_row(name, sides, options.concurrency) for name in sides],
            f"Medians of {options.rounds} rounds (smallest-largest of the ratios). ms per step: one token of "
            "each stream, their prompts included. Aim: a rate of 0.95 of in process.",
        )


if __name__ == "__main__":
    main()
