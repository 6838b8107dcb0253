"""`kill -9` of the process that owns the model, while sixteen clients read.

A server that has ended is restarted at once, as by the simplest supervisor; ours never ends. A stream is lost
when it ends without all of its tokens; its pause is the longest gap between two pieces that contains the kill
or follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import psutil

from bench.client import Answer, ask, client
from bench.models import random_text
from bench.processes import STOP_S_MAX, serving_worker, tree, wait_for
from bench.rivals import Command, Server, prepared, started
from bench.versus.results import OURS, Entry
from bench.versus.turns import TROUBLES, Figure, Task, Values, entries, take_turns, within

LINE = "kill"
STREAMS, TOKENS = 16, 96
ROWS = 2 * STREAMS
"""Twice the streams, so that a new request finds a free row."""
UNDERWAY_PIECES = 8
TEXT_TOKENS = 116
BACK_S_MAX = 90.0
PROBE_S = 0.1
FIGURES = [
    Figure("lost", f"kill -9: streams lost, of {STREAMS}", "", "less"),
    Figure("changed", "streams whose text differs from an undisturbed run", "", "less"),
    Figure("pause", "pause of a stream, median of those not lost", "ms", "less"),
    Figure("back", "time until a new request is answered", "ms", "less"),
]


class Loop:
    """Restarts a process whenever it has ended, in a thread, until closed."""

    def __init__(self, command: Command, log: Path) -> None:
        self._command, self._log = command, log
        self._closed = threading.Event()
        self._first: psutil.Process | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> psutil.Process:
        self._thread.start()
        self._ready.wait(STOP_S_MAX)
        if self._first is None:
            raise RuntimeError("the process did not start")
        return self._first

    def __exit__(self, *raised: object) -> None:
        self._closed.set()
        self._thread.join(2 * STOP_S_MAX)

    def _run(self) -> None:
        while not self._closed.is_set():
            with started(self._command, self._log) as process:
                self._first = self._first or process
                self._ready.set()
                while not self._closed.wait(0.02) and _lives(process):
                    pass


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def kept(name: str, folder: Path) -> Iterator[Server]:
    """Run a server that is restarted when it ends. Raises `ChildProcessError`, `TimeoutError`."""
    with prepared(name, folder, ROWS) as (start, command), Loop(command, start.log) as process:
        wait_for(start.url + command.ready, process)
        yield Server(name, start.url, process, command.fields)


def owner(server: Server) -> int:
    """Return the process id of the process that owns the model: of other servers' processes the largest."""
    if server.name == OURS:
        worker = serving_worker(server.url)
        if worker is None:
            raise RuntimeError("no worker serves")
        return worker
    largest = max(tree(server.process), key=lambda each: each.memory_info().rss)
    return int(largest.pid)


async def stream(server: Server, folder: Path, seed: int, *, kill: bool) -> tuple[list[Answer], float, float]:
    """Return sixteen answers, the time of the kill, and the time when a new request after it was answered."""
    answers = [Answer(underway_pieces=UNDERWAY_PIECES) for _ in range(STREAMS)]
    at = back = time.perf_counter()
    async with client(server) as http:
        texts = [random_text(folder, TEXT_TOKENS, seed + number) for number in range(STREAMS)]
        asked = [
            asyncio.create_task(ask(http, server, text, TOKENS, answer))
            for text, answer in zip(texts, answers, strict=True)
        ]
        for answer in answers:
            await answer.underway.wait()
        if kill:
            at = time.perf_counter()
            os.kill(owner(server), signal.SIGKILL)
            back = await _answered_again(server, folder, seed + STREAMS)
        await asyncio.gather(*asked, return_exceptions=True)
    return answers, at, back


async def _answered_again(server: Server, folder: Path, seed: int) -> float:
    """Return the time of the first new answer. Raises `TimeoutError`. Each try opens a connection, since a
    kept one may lead to the dead process."""
    text, gives_up_at = random_text(folder, 8, seed), time.perf_counter() + BACK_S_MAX
    while time.perf_counter() < gives_up_at:
        with contextlib.suppress(*TROUBLES):
            async with client(server) as http:
                await asyncio.wait_for(_ask_once(http, server, text), BACK_S_MAX)
                return time.perf_counter()
        await asyncio.sleep(PROBE_S)
    raise TimeoutError(f"no answer within {BACK_S_MAX:.0f} s of the kill")


async def _ask_once(http: httpx.AsyncClient, server: Server, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **server.fields}
    (await http.post("/v1/chat/completions", json=body)).raise_for_status()


def values(calm: Sequence[Answer], killed: Sequence[Answer], at: float, back: float) -> dict[str, float]:
    """Return the figures. `calm`: answers to the same requests, undisturbed."""
    pairs = [(right, answer) for right, answer in zip(calm, killed, strict=True)]
    whole = [(right, answer) for right, answer in pairs if answer.tokens >= right.tokens]
    pauses = sorted(_pause(answer, at) for _, answer in whole)
    found = {"lost": float(len(pairs) - len(whole)), "back": 1000 * (back - at)}
    if not whole:
        return found
    changed = float(sum(right.text != answer.text for right, answer in whole))
    return found | {"changed": changed, "pause": 1000 * pauses[len(pauses) // 2]}


def _pause(answer: Answer, at: float) -> float:
    spans = itertools.pairwise([*answer.pieces, answer.pieces[-1]])
    return max((after - before for before, after in spans if after > at), default=0.0)


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line on one model."""
    turns = {name: partial(_turn, name, task.folder) for name in task.names}
    yield entries(task.model, LINE, FIGURES, take_turns(turns, task.rounds, warm=False), task.run)


def _turn(name: str, folder: Path, round: int) -> Values:
    with kept(name, folder) as up:
        return within(_kill(up, folder, 1000 * round))


async def _kill(server: Server, folder: Path, seed: int) -> dict[str, float]:
    calm, _, _ = await stream(server, folder, seed, kill=False)
    killed, at, back = await stream(server, folder, seed, kill=True)
    return values(calm, killed, at, back)
