"""Leaks after ten thousand faults: `python -m tests.faults.leaks --faults 10000`.

A gateway and a scripted worker are joined by a connection that loses, duplicates, swaps and truncates
messages. Some clients read, others stop reading or disconnect at any point, and requests that wait too long
for a row are refused. In the first half the worker is killed repeatedly, in the second half one worker must
survive. Every answer must be that of an undisturbed run. In the end no flight, no row and no prefix in use
may remain, no additional descriptor, thread or process, and hardly more memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.line import Line, harmed
from tests.faults.raw import CHAT, Connection, Pool, get, on_uvloop, post
from tests.faults.runner import run_program
from tests.faults.streams import joined_text, scripted
from tests.system import Process, System, chat_body, running_system, stable

READERS, LEAVERS = 8, 8
ROWS, STEP_MS = 8, 2
SHARE = 0.005
UNDISTURBED_S_MAX = 2.0
WARM_FAULTS = 300
SETTLE_S_MAX = 60.0
BUSY_S = 0.05
UNREAD_S_MAX = 1.5
GROWTH_BYTES_MAX = 16 * 2**20
GOING = ("head", "body", "queue", "stream", "whole", "unread")
"""The phase of the exchange in which a client disconnects, the last one after it has stopped reading."""
FLAGS = ("--queue-timeout", "0.4", "--read-timeout", "0.5", "--max-waiting", "64", "--log-level", "error")
REFUSED = {"worker_unavailable", "model_loading", "text_generation_busy"}


@dataclass(slots=True)
class Outcome:
    """The results of a run. Memory is resident bytes of the gateway and of the second half's worker, after
    warm-up and at the end. `left`: leaks."""

    faults: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    gateway_bytes: list[int] = field(default_factory=list)
    worker_bytes: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Siege:
    """Clients and faults of a system."""

    def __init__(self, system: System, line: Line, seed: int) -> None:
        self.outcome = Outcome()
        self._system, self._line = system, line
        self._dice = random.Random(seed)
        self._pool = Pool(system.port)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, faults: int, kills: int, warm: int = WARM_FAULTS) -> Outcome:
        """Cause at least `faults` faults, including `kills` kills."""
        await self._start_worker()
        await self._suffer(warm, kills=1)
        gateway = await _steady_traces(self._system.gateway)
        self.outcome.gateway_bytes.append(_memory(self._system.gateway))
        await self._suffer(self._total + faults // 2, kills)
        worker = await self._start_worker(instead=True)
        await self._suffer(self._total + warm, kills=0)
        before = await _steady_traces(worker)
        self.outcome.worker_bytes.append(_memory(worker))
        await self._suffer(warm + faults, kills=0)
        await self._compare(self._system.gateway, gateway)
        await self._compare(worker, before)
        self.outcome.gateway_bytes.append(_memory(self._system.gateway))
        self.outcome.worker_bytes.append(_memory(worker))
        await self._pool.close()
        return self.outcome

    @property
    def _total(self) -> int:
        return self.outcome.faults.total() + self._line.counts.total()

    async def _suffer(self, until: int, kills: int) -> None:
        """Cause faults until there were `until`, then end all clients and check for leaks."""
        self._line.share = SHARE
        self._tasks = [asyncio.create_task(self._read_on()) for _ in range(READERS)]
        self._tasks += [asyncio.create_task(self._leave_on()) for _ in range(LEAVERS)]
        for _ in range(kills):
            await asyncio.sleep(self._dice.uniform(0, UNDISTURBED_S_MAX))
            await self._start_worker(instead=True)
            self.outcome.faults["killed"] += 1
        while self._total < until:
            await asyncio.sleep(BUSY_S)
            for task in self._tasks:
                if task.done():
                    task.result()
        self._line.share = 0.0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()
        await self._settle()

    async def _start_worker(self, *, instead: bool = False) -> Process:
        workers = self._system.workers
        if instead:
            workers[-1].kill()
            await asyncio.to_thread(workers[-1].wait)
        flags = ["--step-ms", str(STEP_MS), "--max-running", str(ROWS), "--log-level", "error"]
        worker = self._system.start_worker("--endpoint", self._line.endpoint, *flags)
        while (await self._pool.ask(get("/ready"))).status != 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(BUSY_S)
        return worker

    # --- clients ---

    async def _read_on(self) -> None:
        while True:
            tokens, stream = self._dice.randint(1, 60), self._dice.random() < 0.5
            text = f"go !tokens={tokens}"
            reply = await self._pool.ask(post(CHAT, chat_body(text, stream=stream)))
            if reply.status == 200 and not stream:
                content = reply.document["choices"][0]["message"]["content"]
                if content != scripted(text, tokens):
                    self.outcome.wrong.append(f"{text}: {content!r}")
                self.outcome.answers += 1
            elif reply.status == 200:
                self._judge_stream(reply.body.decode(), scripted(text, tokens))
            else:
                await self._judge_refusal(reply.document["error"])

    def _judge_stream(self, body: str, expected: str) -> None:
        # After the headers the only possible error is a timeout in the queue.
        if "text_generation_busy" in body:
            self.outcome.faults["waited too long"] += 1
        elif joined_text(body) == expected and body.count('"finish_reason":"stop"') == 1:
            self.outcome.answers += 1
        else:
            self.outcome.wrong.append(body[-300:])

    async def _judge_refusal(self, error: dict[str, Any]) -> None:
        if error["code"] not in REFUSED:
            self.outcome.wrong.append(str(error))
        if "did not start" in error["message"]:
            self.outcome.faults["waited too long"] += 1
        await asyncio.sleep(BUSY_S)

    async def _leave_on(self) -> None:
        while True:
            kind = self._dice.choice(GOING)
            await go(self._pool, self._system.port, kind, self._dice)
            self.outcome.faults[f"left in {kind}"] += 1

    # --- leaks ---

    async def _settle(self) -> None:
        """Without clients, wait for all resources to be freed, and record those that are not."""
        ends_at = time.monotonic() + SETTLE_S_MAX
        while (held := await self._held()) and time.monotonic() < ends_at:  # noqa: ASYNC110 - as above
            await asyncio.sleep(BUSY_S)
        if held:
            self.outcome.left.append(f"after {self._total} faults: {held}")

    async def _held(self) -> dict[str, int]:
        """Count requests at the gateway and the worker, and prefixes in use after a cache clear."""
        status = (await self._pool.ask(get("/v1/status"))).document
        found = Counter({name: status["gateway"][name] for name in ("in_flight", "between_workers")})
        for worker in status["workers"]:
            found.update({name: worker[name] for name in ("running", "waiting", "cache_bytes")})
            found["rows"] += len(worker["rows"])
        found["workers more or fewer than one"] = abs(len(status["workers"]) - 1)
        if not +found:
            await self._pool.ask(get("/v1/cache", "DELETE"))
            caches = (await self._pool.ask(get("/v1/cache"))).document["data"]
            found["caches more or fewer than one"] = abs(len(caches) - 1)
            for cache in caches:
                found.update({name: cache[name] for name in ("ram_bytes", "blocks", "snapshots")})
        return dict(+found)

    async def _compare(self, process: Process, before: Counter[str]) -> None:
        ends_at = time.monotonic() + SETTLE_S_MAX
        while (more := _traces(process) - before) and time.monotonic() < ends_at:  # noqa: ASYNC110 - as above
            await asyncio.sleep(BUSY_S)
        self.outcome.left += [
            f"{process.name}: {n} {name} more than {before[name]}" for name, n in more.items()
        ]


def _traces(process: Process) -> Counter[str]:
    stats = process.stats
    children = len(stats.children(recursive=True))
    return Counter(descriptors=stats.num_fds(), threads=stats.num_threads(), children=children)


async def _steady_traces(process: Process) -> Counter[str]:
    """Return the traces once they are stable: connections close a moment after their requests."""
    what = f"the traces of the {process.name}"
    return await asyncio.to_thread(stable, lambda: _traces(process), within_s=SETTLE_S_MAX, what=what)


def _memory(process: Process) -> int:
    return int(process.stats.memory_info().rss)


async def go(pool: Pool, port: int, kind: str, dice: random.Random) -> None:
    """Run a client that disconnects at a random moment in the phase `kind` of `GOING`."""
    connection = await (_narrow(pool, port) if kind == "unread" else pool.open())
    words = f"!tokens=5000 !text={'x' * 2000}" if kind == "unread" else "go " * 2000 + "!tokens=5000"
    request = post(CHAT, chat_body(words, stream=kind in ("stream", "unread")))
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
        elif kind == "unread":
            connection.stop_reading()
            await asyncio.sleep(dice.uniform(0, UNREAD_S_MAX))
        elif dice.random() < 0.5:
            await asyncio.sleep(dice.uniform(0, 0.02))
    finally:
        connection.abort()
    await connection.lost.wait()


async def _narrow(pool: Pool, port: int) -> Connection:
    """Connect with a small receive buffer, so that the server's fills up soon."""
    with contextlib.ExitStack() as unless_connected:
        own = unless_connected.enter_context(socket.socket())
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
        connection = await pool.open(own)
        unless_connected.pop_all()
    return connection


def besiege(folder: Path, faults: int, kills: int, seed: int, warm: int = WARM_FAULTS) -> Outcome:
    """Run the whole test, and also check this process's children."""
    with running_system(folder, FLAGS) as system, harmed(folder, system.endpoint, seed) as line:
        outcome = on_uvloop(Siege(system, line, seed).run(faults, kills, warm))
        outcome.faults.update(line.counts)
        with contextlib.suppress(psutil.NoSuchProcess):
            children = {child.pid for child in psutil.Process().children(recursive=True)}
            strays = children - {system.gateway.pid, system.workers[-1].pid}
            outcome.left += [f"process {pid}" for pid in strays]
    return outcome


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run the whole test, and print its faults and the memory of the processes."""
    outcome = besiege(folder, given.faults, given.faults // 50, given.seed)
    wrong = [*(f"leaked: {what}" for what in outcome.left), *outcome.wrong]
    print(f"{outcome.faults.total()} faults, {outcome.answers} answers: {dict(outcome.faults)}")
    for name, sizes in (("gateway", outcome.gateway_bytes), ("worker", outcome.worker_bytes)):
        before, after = (size / 2**20 for size in sizes)
        told = f"{name}: {before:.1f} MiB when warm, {after:.1f} MiB at the end"
        print(told)
        wrong += [told] if sizes[1] - sizes[0] > GROWTH_BYTES_MAX else []
    return wrong


if __name__ == "__main__":
    run_program(__doc__, check, {"--faults": 10_000, "--seed": 0})
