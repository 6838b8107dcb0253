"""Clients that do not read, and clients that go: `python -m tests.faults.clients --unread 32 --leaving 1000`.

A gateway and a scripted worker. Some clients stream and check what they read. Beside them first as many as
will not read do read, then they do not; then a thousand go at random moments, in the head of their request,
in its body, while they wait, in a stream, in a whole answer. What must hold: the gateway stays as large as it
was, those who read are hardly slower than before, and of those who went nothing is left.

How soon their rows are free is measured by `tests.faults.freeing`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.freeing import measure
from tests.faults.raw import CHAT, Pool, get, on_uvloop, post
from tests.system import System, chat_body, running_system

STEP_MS = 10
READERS = 8
READ_TIMEOUT_S = 5
ROWS = 64
WINDOW_S = 10.0
GROWTH_BYTES_MAX = 32 * 2**20
SPEED_MIN = 0.9
EVENT = b'"content":"'
LONG_TEXT = "x" * 1500
LEAVING_AT_ONCE = 32
GOING = ("head", "body", "queue", "stream", "whole")
"""In which part of its exchange a client goes."""


@dataclass(slots=True)
class Outcome:
    """What became of it all. Bytes are the gateway's resident memory, speeds events per second."""

    bytes_before: int = 0
    bytes_max: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    remains: str = ""
    """Of those who went and those who did not read, at the end."""

    @property
    def calm(self) -> float:
        """Beside as many others as later do not read, or go: the worker's steps cost what they cost."""
        return self.speeds["beside others who read"]

    @property
    def growth(self) -> int:
        return self.bytes_max - self.bytes_before


class Crowd:
    """All clients of one system."""

    def __init__(self, system: System, seed: int, text: str = LONG_TEXT) -> None:
        self.outcome = Outcome()
        self._system = system
        self._dice = random.Random(seed)
        self._pool = Pool(system.port)
        self._events = 0
        self._reading: list[asyncio.Task[None]] = []
        # The texts are long so that the sockets' buffers are soon full.
        self._long = post(CHAT, chat_body(f"!tokens=8000 !text={text}", stream=True))

    async def run(self, unread: int, leaving: int, window_s: float) -> Outcome:
        """The readers all the while; the others one kind after the other."""
        readers = [asyncio.create_task(self._read_on()) for _ in range(READERS)]
        await self._measure("alone", window_s)
        polite = [asyncio.create_task(self._read_long()) for _ in range(unread)]
        await self._measure("beside others who read", window_s)
        await _end(polite)
        await self._settle(READERS)
        before, connections = self._look(), self._connections()
        self.outcome.bytes_before = self._memory()
        watcher = asyncio.create_task(self._watch_memory())
        for _ in range(unread):
            await self._do_not_read()
        await self._measure("beside others who do not", window_s)
        # Who does not read does not notice that he is cut off.
        while self._connections() > connections:  # noqa: ASYNC110 - it is another process that closes them
            await asyncio.sleep(0.1)
        await self._settle(READERS)
        leavers = asyncio.create_task(self._leave(leaving))
        await self._measure("beside others who go", None, leavers)
        await _end(readers)
        await self._settle(0)
        await _end([watcher])
        after = self._look()
        self.outcome.remains = "" if after == before else f"{after}, before that {before}"
        await self._pool.close()
        return self.outcome

    # --- those who read ---

    async def _read_on(self) -> None:
        """Asks again and again; its events count."""
        request = post(CHAT, chat_body("!tokens=100", stream=True))
        while True:
            reply = await self._pool.ask(request)
            count = reply.body.count(EVENT)
            assert reply.status == 200
            assert count == 101, reply.body[-300:]
            self._events += count

    async def _read_long(self) -> None:
        connection = await self._pool.open()
        try:
            await connection.ask(self._long)
        finally:
            connection.abort()

    async def _measure(
        self, name: str, window_s: float | None, during: asyncio.Task[None] | None = None
    ) -> None:
        """The readers' speed, for so long or while that task runs."""
        began, events = time.perf_counter(), self._events
        if during is None:
            assert window_s is not None
            await asyncio.sleep(window_s)
        else:
            await during
        self.outcome.speeds[name] = (self._events - events) / (time.perf_counter() - began)

    # --- those who do not ---

    async def _do_not_read(self) -> None:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self._system.port))
        connection = await self._pool.open(own)
        connection.write(self._long)
        connection.stop_reading()

    # --- those who go ---

    async def _leave(self, count: int) -> None:
        left = iter(range(count))

        async def leave_on() -> None:
            for _ in left:
                kind = self._dice.choice(GOING)
                await go(self._pool, kind, self._dice)
                self.outcome.left[kind] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(LEAVING_AT_ONCE):
                group.create_task(leave_on())

    # --- what is left of them ---

    async def _settle(self, rows: int) -> None:
        """Until nothing is at work but so many readers, who may be between two questions."""
        while True:
            status = (await self._pool.ask(get("/v1/status"))).document
            [worker] = status["workers"]
            if max(status["gateway"]["in_flight"], worker["running"] + worker["waiting"]) <= rows:
                return
            await asyncio.sleep(0.1)

    def _connections(self) -> int:
        """Of clients with the gateway."""
        found = self._system.gateway.stats.net_connections("tcp4")
        return sum(connection.status == "ESTABLISHED" for connection in found)

    def _look(self) -> dict[str, int]:
        """Descriptors and threads, connections aside."""
        stats = self._system.gateway.stats
        return {"descriptors": stats.num_fds() - self._connections(), "threads": stats.num_threads()}

    def _memory(self) -> int:
        return int(self._system.gateway.stats.memory_info().rss)

    async def _watch_memory(self) -> None:
        while True:
            self.outcome.bytes_max = max(self.outcome.bytes_max, self._memory())
            await asyncio.sleep(0.1)


async def go(pool: Pool, kind: str, dice: random.Random) -> None:
    """A client who goes at a random moment, in one of the ways of `GOING`."""
    connection = await pool.open()
    request = post(CHAT, chat_body("go " * 2000 + "!tokens=5000", stream=kind == "stream"))
    head = request.index(b"\r\n\r\n") + 4
    try:
        match kind:
            case "head":
                connection.write(request[: dice.randrange(1, head)])
            case "body":
                connection.write(request[: dice.randrange(head, len(request))])
            case _:
                answer = connection.ask(request)
                answer.add_done_callback(lambda done: done.exception())
        if kind == "stream":
            await connection.has_received(dice.randrange(1, 20_000))
        elif kind == "whole":
            await asyncio.sleep(dice.uniform(0, 0.3))
        elif dice.random() < 0.5:
            await asyncio.sleep(dice.uniform(0, 0.02))
    finally:
        connection.abort()
    await connection.lost.wait()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError | None):
            raise ended


def start(system: System) -> None:
    system.start_worker("--step-ms", str(STEP_MS), "--max-running", str(ROWS))
    system.wait_ready()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unread", type=int, default=32)
    parser.add_argument("--leaving", type=int, default=1000)
    parser.add_argument("--window", type=float, default=WINDOW_S)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    flags = ["--max-waiting", "64", "--read-timeout", str(READ_TIMEOUT_S), "--log-level", "warning"]
    with tempfile.TemporaryDirectory() as folder, running_system(Path(folder), flags) as system:
        start(system)
        outcome = on_uvloop(Crowd(system, given.seed).run(given.unread, given.leaving, given.window))
    for name, speed in outcome.speeds.items():
        print(f"{READERS} readers {name}: {speed:.0f} events/s, {speed / outcome.calm:.2f} of that in peace")
    print(f"{given.unread} did not read; {dict(outcome.left)} went")
    print(f"the gateway grew by {outcome.growth / 2**20:.1f} MiB at the most (of {GROWTH_BYTES_MAX >> 20})")
    print(f"left of them: {outcome.remains or 'nothing'}")
    with tempfile.TemporaryDirectory() as folder:
        soon = measure(Path(folder), 20, given.seed)
    kept = min(outcome.speeds.values()) >= SPEED_MIN * outcome.calm
    return 0 if kept and soon and outcome.growth <= GROWTH_BYTES_MAX and not outcome.remains else 1


if __name__ == "__main__":
    raise SystemExit(main())
