"""Requests at a multiple of the capacity: `python -m tests.faults.overload --seconds 60 --times 10`.

A closed loop of clients measures the rate at capacity. Beyond it, the server must answer as many, refuse the
rest in milliseconds with a Retry-After, and never exceed its limit of requests in flight. The clients run in
this process, so measured times are upper bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.raw import CHAT, Pool, Reply, on_uvloop, post
from tests.faults.runner import run_program
from tests.faults.streams import joined_text, scripted
from tests.system import System, chat_body, running_system

ROWS, WAITING_MAX = 16, 64
STEP_MS, TOKENS = 10, 20
CALM_S_MIN = 1.0
QUESTION = f"go !tokens={TOKENS}"
GOODPUT_MIN = 0.95
REFUSED_S_MAX = 0.020
JUDGED_S_MIN = 10.0


@dataclass(slots=True)
class Outcome:
    """The results of a phase. `in_house_max`: requests in flight according to refusals. `wrong`: the
    beginnings of wrong answers."""

    seconds: float = 0.0
    served: int = 0
    refused_s: list[float] = field(default_factory=list)
    retry_after: set[int] = field(default_factory=set)
    in_house_max: int = 0
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
            text = reply.document["choices"][0]["message"]["content"]
        else:
            text = joined_text(reply.body.decode()) if reply.body.endswith(b"[DONE]\n\n") else ""
        if text == scripted(QUESTION, TOKENS):
            self.served += 1
        else:
            self.wrong.append(f"a wrong answer: {reply.body[-200:]!r}")

    def _take_refusal(self, reply: Reply) -> None:
        self.refused_s.append(reply.took_s)
        error = reply.document["error"]
        self.in_house_max = max(self.in_house_max, error["running"] + error["waiting"])
        named = len(error["running_ids"]) + len(error["waiting_ids"])
        self.retry_after.add(int(reply.headers.get("retry-after", 0)))
        if not named or "retry-after" not in reply.headers:
            self.wrong.append(f"refused without a Retry-After or request ids: {reply.headers} {error}")


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))] if values else 0.0


class Load:
    """Clients of a system, all on one event loop."""

    def __init__(self, system: System, seed: int) -> None:
        self._dice = random.Random(seed)
        self._pool = Pool(system.port)
        self._requests = [post(CHAT, chat_body(QUESTION, stream=stream)) for stream in (False, True)]

    async def at_capacity(self, seconds: float) -> Outcome:
        """Run as many clients as may be in flight; each sends a request after each answer."""
        outcome = Outcome(seconds)
        ends_at = asyncio.get_running_loop().time() + seconds

        async def ask_on() -> None:
            while asyncio.get_running_loop().time() < ends_at:
                await self._ask(outcome, ends_at)

        await asyncio.gather(*(ask_on() for _ in range(ROWS + WAITING_MAX)))
        return outcome

    async def beyond(self, per_second: float, seconds: float) -> Outcome:
        """Send requests at this rate, at random instants."""
        outcome, loop = Outcome(seconds), asyncio.get_running_loop()
        due = loop.time()
        ends_at = due + seconds
        async with asyncio.TaskGroup() as asking:
            while due < ends_at:
                await asyncio.sleep(due - loop.time())
                asking.create_task(self._ask(outcome, ends_at))
                due += self._dice.expovariate(per_second)
        return outcome

    async def _ask(self, outcome: Outcome, ends_at: float) -> None:
        """Send a request; an answer after `ends_at` is not counted."""
        reply = await self._pool.ask(self._dice.choice(self._requests))
        if reply.status != 200 or asyncio.get_running_loop().time() <= ends_at:
            outcome.take(reply)

    async def close(self) -> None:
        await self._pool.close()


async def run(system: System, seconds: float, times: float, seed: int) -> tuple[Outcome, Outcome]:
    """Return the results at capacity, measured before and after the overload, and those of the overload."""
    load = Load(system, seed)
    try:
        first = await load.at_capacity(max(CALM_S_MIN, seconds / 4))
        # On a busy machine, `times` the capacity may be fewer requests than may wait.
        least = 2 * (ROWS + WAITING_MAX) / seconds
        beyond = await load.beyond(max(least, times * first.goodput), seconds)
        second = await load.at_capacity(max(CALM_S_MIN, seconds / 4))
    finally:
        await load.close()
    calm = Outcome(first.seconds + second.seconds, first.served + second.served)
    calm.wrong = first.wrong + second.wrong
    return calm, beyond


def start(system: System) -> None:
    """Start the worker under test."""
    system.start_ready_worker("--step-ms", str(STEP_MS), "--max-running", str(ROWS))


def complaints(calm: Outcome, beyond: Outcome) -> list[str]:
    """Return the failures that do not depend on the machine's speed."""
    found = calm.wrong + beyond.wrong
    if beyond.in_house_max > ROWS + WAITING_MAX:
        found.append(f"{beyond.in_house_max} requests were in flight")
    return found


def _quantiles(seconds: Sequence[float]) -> str:
    return ", ".join(f"p{100 * q:g} {1000 * quantile(seconds, q):.1f} ms" for q in (0.5, 0.99, 0.999))


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run all phases in a new system, and judge goodput and refusals; a short measurement is not judged."""
    with running_system(folder, ["--max-waiting", str(WAITING_MAX), "--log-level", "error"]) as system:
        start(system)
        calm, beyond = on_uvloop(run(system, given.seconds, given.times, given.seed))
    print(f"at capacity {calm.goodput:.1f} answers/s; at {given.times:g} times that {beyond.goodput:.1f}:")
    share = f"goodput {beyond.goodput / calm.goodput:.3f} of that at capacity (at least {GOODPUT_MIN})"
    refused = f"refused in {_quantiles(beyond.refused_s)} (p99 at most {1000 * REFUSED_S_MAX:g} ms)"
    print(share)
    print(f"{len(beyond.refused_s)} refused, all with a Retry-After ({sorted(beyond.retry_after)} s)")
    print(refused)
    print(f"at most {beyond.in_house_max} in flight")
    wrong = complaints(calm, beyond)
    if given.seconds >= JUDGED_S_MIN:
        wrong += [share] if beyond.goodput < GOODPUT_MIN * calm.goodput else []
        wrong += [refused] if quantile(beyond.refused_s, 0.99) > REFUSED_S_MAX else []
    return wrong


if __name__ == "__main__":
    run_program(__doc__, check, {"--seconds": 60.0, "--times": 10.0, "--seed": 0})
