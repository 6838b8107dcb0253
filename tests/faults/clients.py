"""Clients that do not read or that disconnect: `python -m tests.faults.clients --unread 32 --leaving 1000`.

The system is a gateway and a scripted worker. Some clients stream and check what they read. Next to them
`--unread` clients first read, as a baseline, and then stop reading. Then `--leaving` clients disconnect at
random moments: in the request's head or body, in the queue, in a stream, or in a document response. The
gateway must not grow, the readers must hardly be slower, and nothing may remain of the disconnected clients.

`tests.faults.freeing` measures how soon their rows are free.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.freeing import measure
from tests.faults.raw import CHAT, Pool, get, on_uvloop, post
from tests.faults.runner import run_program
from tests.system import System, chat_body, running_system, stable

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
SETTLE_S_MAX = 20.0
"""Timeout for descriptors and threads to return to the initial counts when idle."""
GOING = ("head", "body", "queue", "stream", "whole")
"""The phase of the exchange in which a client disconnects."""


@dataclass(slots=True)
class Outcome:
    """The results of a run. Bytes are the gateway's resident memory, speeds are in events per second."""

    bytes_before: int = 0
    bytes_max: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)

    @property
    def calm(self) -> float:
        """The baseline speed, with as many other clients, because the step time depends on their number."""
        return self.speeds["beside others who read"]

    @property
    def growth(self) -> int:
        return self.bytes_max - self.bytes_before


class Crowd:
    """All clients of a system."""

    def __init__(self, system: System, seed: int, text: str = LONG_TEXT) -> None:
        self.outcome = Outcome()
        self._system = system
        self._dice = random.Random(seed)
        self._pool = Pool(system.port)
        self._events = 0
        self._reading: list[asyncio.Task[None]] = []
        # Long texts fill the sockets' buffers quickly.
        self._long = post(CHAT, chat_body(f"!tokens=8000 !text={text}", stream=True))

    async def run(self, unread: int, leaving: int, window_s: float) -> Outcome:
        """Run the readers throughout, and the other kinds of clients one after the other.

        Raises `AssertionError` if resources of clients are left at the end.
        """
        readers = [asyncio.create_task(self._read_on()) for _ in range(READERS)]
        await self._measure("alone", window_s)
        polite = [asyncio.create_task(self._read_long()) for _ in range(unread)]
        await self._measure("beside others who read", window_s)
        await _end(polite)
        await self._settle(READERS)
        before, connections = await self._steady(), self._connections()
        self.outcome.bytes_before = self._memory()
        watcher = asyncio.create_task(self._watch_memory())
        for _ in range(unread):
            await self._do_not_read()
        await self._measure("beside others who do not", window_s)
        # A client that does not read does not notice that its connection was closed.
        while self._connections() > connections:  # noqa: ASYNC110 - it is another process that closes them
            await asyncio.sleep(0.1)
        await self._settle(READERS)
        leavers = asyncio.create_task(self._leave(leaving))
        await self._measure("beside others who go", None, leavers)
        await _end(readers)
        await self._settle(0)
        await _end([watcher])
        await self._steady(like=before)
        await self._pool.close()
        return self.outcome

    # --- clients that read ---

    async def _read_on(self) -> None:
        """Send request after request, and count the events."""
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
        """Measure the readers' speed for `window_s` seconds, or until `during` ends."""
        began, events = time.perf_counter(), self._events
        if during is None:
            assert window_s is not None
            await asyncio.sleep(window_s)
        else:
            await during
        self.outcome.speeds[name] = (self._events - events) / (time.perf_counter() - began)

    # --- clients that do not read ---

    async def _do_not_read(self) -> None:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self._system.port))
        connection = await self._pool.open(own)
        connection.write(self._long)
        connection.stop_reading()

    # --- clients that disconnect ---

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

    # --- leaks ---

    async def _settle(self, rows: int) -> None:
        """Wait until only `rows` readers are active; they may be between two requests."""
        while True:
            status = (await self._pool.ask(get("/v1/status"))).document
            [worker] = status["workers"]
            if max(status["gateway"]["in_flight"], worker["running"] + worker["waiting"]) <= rows:
                return
            await asyncio.sleep(0.1)

    def _connections(self) -> int:
        """Count the clients' connections to the gateway."""
        found = self._system.gateway.stats.net_connections("tcp4")
        return sum(connection.status == "ESTABLISHED" for connection in found)

    def _look(self) -> dict[str, int]:
        """Count the gateway's descriptors, without connections, and its threads."""
        stats = self._system.gateway.stats
        return {"descriptors": stats.num_fds() - self._connections(), "threads": stats.num_threads()}

    async def _steady(self, like: dict[str, int] | None = None) -> dict[str, int]:
        """Return the counts once they are stable: connections close a moment after their requests.

        `like`: the expected counts.
        """
        return await asyncio.to_thread(
            stable,
            self._look,
            within_s=SETTLE_S_MAX,
            what=f"the gateway, {like} before",
            accept=lambda now: now == (like or now),
        )

    def _memory(self) -> int:
        return int(self._system.gateway.stats.memory_info().rss)

    async def _watch_memory(self) -> None:
        while True:
            self.outcome.bytes_max = max(self.outcome.bytes_max, self._memory())
            await asyncio.sleep(0.1)


async def go(pool: Pool, kind: str, dice: random.Random) -> None:
    """Run a client that disconnects at a random moment in the phase `kind` of `GOING`."""
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


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run all clients, and measure how soon the rows of clients that leave are free."""
    flags = ["--max-waiting", "64", "--read-timeout", str(READ_TIMEOUT_S), "--log-level", "warning"]
    with running_system(folder, flags) as system:
        start(system)
        outcome = on_uvloop(Crowd(system, given.seed).run(given.unread, given.leaving, given.window))
    wrong = []
    for name, speed in outcome.speeds.items():
        told = f"{READERS} readers {name}: {speed:.0f} events/s, {speed / outcome.calm:.2f} of the baseline"
        print(told)
        wrong += [told] if speed < SPEED_MIN * outcome.calm else []
    print(f"{given.unread} did not read; {dict(outcome.left)} disconnected")
    told = f"the gateway grew by {outcome.growth / 2**20:.1f} MiB at most (limit {GROWTH_BYTES_MAX >> 20})"
    print(told)
    wrong += [told] if outcome.growth > GROWTH_BYTES_MAX else []
    (folder / "freeing").mkdir()
    return wrong + measure(folder / "freeing", 20, given.seed)


if __name__ == "__main__":
    options = {"--unread": 32, "--leaving": 1000, "--window": WINDOW_S, "--seed": 0}
    run_program(__doc__, check, options)
