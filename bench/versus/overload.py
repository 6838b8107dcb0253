"""Ten times as many requests as a server can handle: its throughput, and the outcome of the other requests.

First, as many clients as it has rows send one request after another: that is its capacity. Then requests
arrive at ten times that rate for some seconds, at random times, independently of earlier ones; each client
waits for a limited time. Servers run one at a time: requests that one still processes would disturb the next.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.models import random_text
from bench.rivals import Server, server
from bench.versus.results import Entry
from bench.versus.turns import Figure, Task, Values, entries, take_turns, within
from deploy.load.samples import percentile
from tests.faults.raw import CHAT, post

LINE = "overload"
ROWS = 16
TIMES = 10
CALM_S, POUR_S, PATIENCE_S = 6.0, 6.0, 10.0
TEXT_TOKENS, MAX_TOKENS = 32, 16
REFUSALS = (429, 503)
FIGURES = [
    Figure("capacity", f"{ROWS} clients, answers/s", "", "more"),
    Figure("served", f"at {TIMES} times that rate, answers/s relative to it", "x", "more"),
    Figure("refused", f"at {TIMES} times, time to a refusal, p99", "ms", "less"),
    Figure("told", f"at {TIMES} times, refused with 429 or 503", "%", "more"),
    Figure("lost", f"at {TIMES} times, no answer in {PATIENCE_S:.0f} s, or cut off", "%", "less"),
]


@dataclass
class Outcome:
    """Outcomes of requests. `served`: those answered in the measured time."""

    served: int = 0
    refused_s: list[float] = field(default_factory=list)
    lost: int = 0
    late: int = 0
    """Requests answered after that time."""

    @property
    def asked(self) -> int:
        return self.served + len(self.refused_s) + self.lost + self.late


def values(capacity: float, outcome: Outcome, seconds: float) -> dict[str, float]:
    """Return the figures; without a refusal there is no time of one."""
    refused = {"refused": 1000 * percentile(outcome.refused_s, 99)} if outcome.refused_s else {}
    return refused | {
        "capacity": capacity,
        "served": outcome.served / seconds / capacity,
        "told": 100 * len(outcome.refused_s) / outcome.asked,
        "lost": 100 * outcome.lost / outcome.asked,
    }


class Clients:
    """All clients, on one event loop, with a connection for each request."""

    def __init__(self, server: Server, folder: Path, seed: int) -> None:
        self._server, self._folder = server, folder
        self._dice = random.Random(seed)
        self._seeds = iter(range(seed, seed + 100_000))

    async def at_capacity(self, seconds: float) -> float:
        """Return the answers per second."""
        outcome, ends_at = Outcome(), time.perf_counter() + seconds

        async def ask_on() -> None:
            while time.perf_counter() < ends_at:
                await self._ask(outcome, ends_at)

        await asyncio.gather(*(ask_on() for _ in range(ROWS)))
        return outcome.served / seconds

    async def beyond(self, per_second: float, seconds: float) -> Outcome:
        """Return the outcome of requests at this rate."""
        outcome, due = Outcome(), time.perf_counter()
        ends_at = due + seconds
        async with asyncio.TaskGroup() as asking:
            while due < ends_at:
                await asyncio.sleep(due - time.perf_counter())
                asking.create_task(self._ask(outcome, ends_at))
                due += self._dice.expovariate(per_second)
        return outcome

    async def _ask(self, outcome: Outcome, ends_at: float) -> None:
        text = random_text(self._folder, TEXT_TOKENS, next(self._seeds))
        began = time.perf_counter()
        try:
            status = await asyncio.wait_for(_status(self._server, text), PATIENCE_S)
        except (OSError, EOFError, TimeoutError, ValueError):
            outcome.lost += 1
            return
        if status in REFUSALS:
            outcome.refused_s.append(time.perf_counter() - began)
        elif status != 200:
            outcome.lost += 1
        elif time.perf_counter() <= ends_at:
            outcome.served += 1
        else:
            outcome.late += 1


async def _status(server: Server, text: str) -> int:
    """Return the HTTP status of a complete answer. Raises `OSError`, `EOFError`, or `ValueError` if it is not
    HTTP."""
    message = {"role": "user", "content": text}
    document = {"messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0, **server.fields}
    request = post(CHAT, document, "content-type: application/json", "connection: close")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request)
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        if not body:
            raise EOFError("cut off")
        return int(head.split(b" ", 2)[1])
    finally:
        writer.transport.abort()


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line on one model."""
    turns = {name: partial(_turn, name, task.folder) for name in task.names}
    yield entries(task.model, LINE, FIGURES, take_turns(turns, task.rounds, warm=False), task.run)


def _turn(name: str, folder: Path, round: int) -> Values:
    with server(name, folder, ROWS) as up:
        return within(_overload(Clients(up, folder, 1_000_000 * round)))


async def _overload(clients: Clients) -> dict[str, float]:
    await clients.at_capacity(CALM_S / 3)
    capacity = await clients.at_capacity(CALM_S)
    if not capacity:
        raise RuntimeError(f"no answer in {CALM_S:.0f} s at capacity")
    return values(capacity, await clients.beyond(TIMES * capacity, POUR_S), POUR_S)
