"""Several workers of the embedded model: routing by prefix affinity compared with routing by load.

    python -m bench.affinity [--replicas 2,4] [--rounds 3] [--agents 8] [--turns 10] [--flood 64] [--floods 3]

Agents with separate conversations behind one system prompt run at once, each sending its next turn when it
has its answer. `--routing affinity` and `--routing load` take turns; each round has new words. Then, also in
turns, many requests at once whose prompts share a prefix: requests per worker, and requests per second. The
disk tier is off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.client import Answer, ask, client
from bench.processes import free_port, running, socket_folder, wait_for, wait_until
from bench.rivals import Server
from bench.timing import print_table
from deploy.load.samples import percentile

METHODS = "affinity", "load"
SHARED_WORDS, OPENING_WORDS, TURN_WORDS = 150, 150, 40
ANSWER_TOKENS = 16
FLOOD_WORDS = 300
WORDS = Path(__file__).with_name("notes").joinpath("speculation.md").read_text(encoding="utf-8").split()


@dataclass(frozen=True)
class Flood:
    """Result of a flood: requests per worker in ascending order, seconds, and the cached share of the
    prompts."""

    shares: list[int]
    seconds: float
    cached: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return sum(self.shares) / self.seconds


@dataclass
class Side:
    """A `serve` with `replicas` workers, and its agents' answers. `turns`: those after an agent's first."""

    method: str
    replicas: int
    server: Server
    turns: list[Answer] = field(default_factory=list)
    openings: list[Answer] = field(default_factory=list)
    floods: list[Flood] = field(default_factory=list)

    def workers(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.server.url}/v1/status", timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["workers"]
            return [each for each in found if each["state"] == "ready"]

    def dispatched(self) -> Counter[int]:
        """Return the requests dispatched to each worker so far, by process id."""
        return Counter({each["pid"]: each["dispatched"] for each in self.workers()})


def words(count: int, dice: random.Random) -> str:
    """Return `count` random words, different in each call."""
    return " ".join(dice.choices(WORDS, k=count))


async def converse(side: Side, system: str, seed: str, turns: int) -> None:
    """Run one agent."""
    dice = random.Random(seed)
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": words(OPENING_WORDS, dice)},
    ]
    async with client(side.server) as http:
        for turn in range(turns):
            answer = await ask(http, side.server, messages, ANSWER_TOKENS, ignore_eos=True)
            (side.turns if turn else side.openings).append(answer)
            said = {"role": "assistant", "content": answer.text}
            messages = [*messages, said, {"role": "user", "content": words(TURN_WORDS, dice)}]


async def trace(side: Side, number: int, agents: int, turns: int) -> None:
    """Run all agents of a round."""
    system = words(SHARED_WORDS, random.Random(f"system {number}"))
    await asyncio.gather(*(converse(side, system, f"{number} {agent}", turns) for agent in range(agents)))


async def flood(side: Side, number: int, count: int) -> None:
    """Send `count` requests at once whose prompts share a new prefix."""
    beginning = words(FLOOD_WORDS, random.Random(f"flood {number}"))
    before = side.dispatched()
    async with client(side.server) as http:
        began = time.perf_counter()
        asked = (ask(http, side.server, f"{beginning} {i}", 4, ignore_eos=True) for i in range(count))
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
    after = side.dispatched()
    shares = sorted(after[pid] - before[pid] for pid in after)
    side.floods.append(Flood(shares, seconds, cached_share(answers)))


@contextlib.contextmanager
def serving(method: str, replicas: int, folder: Path) -> Iterator[Side]:
    """Run a `serve` and wait until all its workers are ready."""
    port = free_port()
    flags = [f"--port={port}", f"--replicas={replicas}", f"--routing={method}", "--spare=0"]
    flags += ["--prefix-cache-disk=0", f"--memory-budget={replicas}GiB", "--max-waiting=256"]
    nothing_said = {name: "" for name in os.environ if name.startswith("ROUNDHOUSE_")}
    environ = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder), **nothing_said}
    with running("deploy", ["serve", *flags], environ, log=folder / f"{method}-{replicas}.log") as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/ready", process)
        side = Side(method, replicas, Server("roundhouse", url, process))
        wait_until(lambda: len(side.workers()) == replicas, "not all workers were ready")
        yield side


def measure(sides: Sequence[Side], rounds: int, agents: int, turns: int) -> None:
    """Run the rounds in turns; a short round before the first warms up and is left out. With no rounds
    nothing is sent."""
    for number in range(rounds + 1 if rounds else 0):
        for side in sides if number % 2 else list(reversed(sides)):
            asyncio.run(trace(side, number, agents, turns if number else 2))
            if not number:
                side.turns.clear()
                side.openings.clear()


def cached_share(answers: Sequence[Answer]) -> float:
    """Return the cached share of all prompt tokens."""
    cached = sum(answer.cached_tokens or 0 for answer in answers)
    return cached / sum(answer.prompt_tokens for answer in answers)


def half_missed(answers: Sequence[Answer]) -> int:
    """Count the answers with less than half of their prompts cached."""
    return sum(2 * (answer.cached_tokens or 0) < answer.prompt_tokens for answer in answers)


def _row(side: Side) -> list[str]:
    first = [1000 * answer.first_s for answer in side.turns]
    return [
        f"{side.replicas} workers, {side.method}",
        f"{cached_share([*side.openings, *side.turns]):.3f}",
        f"{cached_share(side.turns):.3f}",
        f"{half_missed(side.turns)} of {len(side.turns)}",
        f"{statistics.median(first):,.0f}",
        f"{percentile(first, 90):,.0f}",
    ]


def drown(sides: Sequence[Side], rounds: int, count: int) -> None:
    """Run the floods in turns; the first round warms up and is left out."""
    for number in range(rounds + 1):
        for side in sides if number % 2 else list(reversed(sides)):
            asyncio.run(flood(side, number, count))
            if not number:
                side.floods.clear()


def report(sides: Sequence[Side], legend: str) -> None:
    head = ["", "cached, all", "cached, turns 2-", "under half", "first text, median", "p90"]
    near, blind = (statistics.median(a.first_s for a in side.turns) for side in sides)
    rows = [*map(_row, sides), ["affinity over load", "", "", "", f"{near / blind:.2f}", ""]]
    longest = max(answer.prompt_tokens for side in sides for answer in side.turns)
    legend += f" prompts of at most {longest} tokens."
    print_table("Agents' prompts", head, rows, f"{legend} First text in milliseconds.")


def report_floods(sides: Sequence[Side]) -> None:
    rows = [
        [
            f"{side.replicas} workers, {side.method}",
            "; ".join(" ".join(map(str, each.shares)) for each in side.floods),
            f"{statistics.median(each.shares[0] / each.shares[-1] for each in side.floods):.2f}",
            f"{statistics.median(each.cached for each in side.floods):.3f}",
            f"{statistics.median(each.rate for each in side.floods):.2f}",
        ]
        for side in sides
    ]
    near, blind = (side.floods for side in sides)
    ratios = sorted(one.rate / other.rate for one, other in zip(near, blind, strict=True))
    rows.append(
        [
            "affinity over load",
            "",
            "",
            "",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})",
        ]
    )
    head = ["", "by worker", "fewest over most", "cached", "requests/s"]
    legend = (
        f"{sum(near[0].shares)} requests at once; medians of {len(near)} rounds and of the rounds' ratios."
    )
    print_table("A flood of requests with one prefix", head, rows, legend)
    for side in sides:
        speeds = "; ".join(
            " ".join(f"{each or 0:.0f}" for each in worker["speed"].values()) for worker in side.workers()
        )
        print(f"{side.method}: measured tokens/s of prefill and of decode, by worker: {speeds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--flood", type=int, default=64)
    parser.add_argument("--floods", type=int, default=3)
    asked = parser.parse_args()
    for replicas in map(int, asked.replicas.split(",")):
        with contextlib.ExitStack() as stack:
            folders = [stack.enter_context(socket_folder()) for _ in METHODS]
            sides = [
                stack.enter_context(serving(method, replicas, folder))
                for method, folder in zip(METHODS, folders, strict=True)
            ]
            measure(sides, asked.rounds, asked.agents, asked.turns)
            drown(sides, asked.floods, asked.flood)
            legend = f"{asked.agents} agents, {asked.turns} turns, {asked.rounds} rounds;"
            if asked.rounds:
                report(sides, legend)
            report_floods(sides)


if __name__ == "__main__":
    main()
