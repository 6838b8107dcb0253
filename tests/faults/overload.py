"""More than it can do: `python -m tests.faults.overload --seconds 60 --times 10`.

A gateway and a scripted worker whose capacity is known, from rows and steps. First as many clients as it
takes ask in turns, which shows what it does at capacity; then requests come at so many times that rate,
whatever becomes of those before them. What must hold: it serves as much as at capacity, refuses the rest in
milliseconds and says when to come back, and never has more in the house than it may.

The clients run in this process, so what they measure is never less than what a client would see.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.raw import CHAT, Pool, Reply, get, on_uvloop, post
from tests.faults.streams import scripted
from tests.system import System, chat_body, running_system

ROWS, WAITING_MAX = 16, 64
STEP_MS, TOKENS = 10, 20
SAMPLE_S = 0.1
CALM_S_MIN = 1.0
QUESTION = f"go !tokens={TOKENS}"
GOODPUT_MIN = 0.95
REFUSED_S_MAX = 0.020
JUDGED_S_MIN = 10.0


@dataclass(slots=True)
class Outcome:
    """What became of a while. `in_house_max`: as refusals say, when it was full. `waiting_max`: as the worker
    said now and then. `late_s`: by how much requests were sent later than they were due, for want of a core.
    `wrong`: the first words of what went wrong."""

    seconds: float = 0.0
    served: int = 0
    refused_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    retry_after: set[int] = field(default_factory=set)
    waiting_max: int = 0
    in_house_max: int = 0
    gateway_cpu_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Answers per second."""
        return self.served / self.seconds

    def take(self, reply: Reply) -> None:
        if reply.status == 200:
            self._take_answer(reply)
        elif reply.status == 503 and reply.document["error"]["code"] == "text_generation_busy":
            self._take_refusal(reply)
        else:
            self.wrong.append(f"{reply.status}: {reply.body[:200]!r}")

    def _take_answer(self, reply: Reply) -> None:
        if reply.headers["content-type"] == "application/json":
            whole = reply.document["choices"][0]["message"]["content"] == scripted(QUESTION, TOKENS)
        else:
            whole = reply.body.count(b'"content":"') == 1 + TOKENS and reply.body.endswith(b"[DONE]\n\n")
        if whole:
            self.served += 1
        else:
            self.wrong.append(f"not the answer: {reply.body[-200:]!r}")

    def _take_refusal(self, reply: Reply) -> None:
        self.refused_s.append(reply.took_s)
        error = reply.document["error"]
        self.in_house_max = max(self.in_house_max, error["running"] + error["waiting"])
        named = len(error["running_ids"]) + len(error["waiting_ids"])
        self.retry_after.add(int(reply.headers.get("retry-after", 0)))
        if not named or "retry-after" not in reply.headers:
            self.wrong.append(f"refused without a word: {reply.headers} {error}")


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))] if values else 0.0


class Load:
    """Clients of one system, all on one event loop."""

    def __init__(self, system: System, seed: int) -> None:
        self._system = system
        self._dice = random.Random(seed)
        self._pool = Pool(system.port)
        self._requests = [post(CHAT, chat_body(QUESTION, stream=stream)) for stream in (False, True)]

    async def at_capacity(self, seconds: float) -> Outcome:
        """As many clients as the house holds; each asks again when it has its answer."""
        return await self._watch(seconds, lambda outcome: self._keep_full(outcome, seconds))

    async def beyond(self, per_second: float, seconds: float) -> Outcome:
        """Requests at this rate, at random instants."""
        return await self._watch(seconds, lambda outcome: self._pour(outcome, per_second, seconds))

    async def _watch(self, seconds: float, load: Any) -> Outcome:
        outcome, stats = Outcome(seconds), self._system.gateway.stats
        before = stats.cpu_times()
        watcher = asyncio.create_task(self._look(outcome))
        await load(outcome)
        watcher.cancel()
        after = stats.cpu_times()
        outcome.gateway_cpu_s = after.user + after.system - before.user - before.system
        return outcome

    async def _keep_full(self, outcome: Outcome, seconds: float) -> None:
        ends_at = asyncio.get_running_loop().time() + seconds

        async def ask_on() -> None:
            while asyncio.get_running_loop().time() < ends_at:
                await self._ask(outcome, ends_at)

        await asyncio.gather(*(ask_on() for _ in range(ROWS + WAITING_MAX)))

    async def _pour(self, outcome: Outcome, per_second: float, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        ends_at = due + seconds
        async with asyncio.TaskGroup() as asking:
            while due < ends_at:
                await asyncio.sleep(due - loop.time())
                outcome.late_s.append(max(0.0, loop.time() - due))
                asking.create_task(self._ask(outcome, ends_at))
                due += self._dice.expovariate(per_second)

    async def _ask(self, outcome: Outcome, ends_at: float) -> None:
        """What is answered later than that is no part of the outcome."""
        reply = await self._pool.ask(self._dice.choice(self._requests))
        if reply.status != 200 or asyncio.get_running_loop().time() <= ends_at:
            outcome.take(reply)

    async def _look(self, outcome: Outcome) -> None:
        while True:
            status = (await self._pool.ask(get("/v1/status"))).document
            [worker] = status["workers"]
            outcome.waiting_max = max(outcome.waiting_max, worker["waiting"])
            await asyncio.sleep(SAMPLE_S)

    async def close(self) -> None:
        await self._pool.close()


async def run(system: System, seconds: float, times: float, seed: int) -> tuple[Outcome, Outcome]:
    """What it does at capacity, in two parts around the overload, and what beyond."""
    load = Load(system, seed)
    try:
        first = await load.at_capacity(max(CALM_S_MIN, seconds / 4))
        beyond = await load.beyond(times * first.goodput, seconds)
        second = await load.at_capacity(max(CALM_S_MIN, seconds / 4))
    finally:
        await load.close()
    calm = Outcome(first.seconds + second.seconds, first.served + second.served)
    calm.wrong = first.wrong + second.wrong
    return calm, beyond


def start(system: System) -> None:
    """The worker that this is about."""
    system.start_worker("--step-ms", str(STEP_MS), "--max-running", str(ROWS))
    system.wait_ready()


def complaints(calm: Outcome, beyond: Outcome) -> list[str]:
    """What must not be, whatever the machine."""
    found = calm.wrong + beyond.wrong
    if beyond.in_house_max > ROWS + WAITING_MAX:
        found.append(f"{beyond.in_house_max} were in the house")
    return found


def _quantiles(seconds: Sequence[float]) -> str:
    return ", ".join(f"p{100 * q:g} {1000 * quantile(seconds, q):.1f} ms" for q in (0.5, 0.99, 0.999))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    flags = ["--max-waiting", str(WAITING_MAX), "--log-level", "error"]
    with tempfile.TemporaryDirectory() as folder, running_system(Path(folder), flags) as system:
        start(system)
        calm, beyond = on_uvloop(run(system, given.seconds, given.times, given.seed))
    print(f"at capacity {calm.goodput:.1f} answers/s; at {given.times:g} times that {beyond.goodput:.1f}:")
    print(f"goodput {beyond.goodput / calm.goodput:.3f} of that at capacity (at least {GOODPUT_MIN})")
    print(f"{len(beyond.refused_s)} refused, all told when to come back ({sorted(beyond.retry_after)} s)")
    print(f"refused in {_quantiles(beyond.refused_s)} (p99 at most {1000 * REFUSED_S_MAX:g} ms)")
    print(f"the clients themselves were late by {_quantiles(beyond.late_s)}")
    print(f"at the most {beyond.waiting_max} waited, {beyond.in_house_max} in the house")
    load = beyond.gateway_cpu_s / beyond.seconds
    each_ms = 1000 * beyond.gateway_cpu_s / max(1, beyond.served + len(beyond.refused_s))
    print(f"the gateway took {load:.2f} of a core, {each_ms:.2f} ms for each request")
    wrong = complaints(calm, beyond)
    for each in wrong[:5]:
        print(each)
    # What is measured in a moment says little.
    met = given.seconds < JUDGED_S_MIN or (
        beyond.goodput >= GOODPUT_MIN * calm.goodput and quantile(beyond.refused_s, 0.99) <= REFUSED_S_MAX
    )
    return 0 if met and not wrong else 1


if __name__ == "__main__":
    raise SystemExit(main())
