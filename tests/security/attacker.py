"""What the attacks share: a real server, requests as bytes on new connections, and the check of answers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from protocol.errors import Code
from tests.faults.bodies import Answer, read_answer
from tests.hosts import Images, serving_images
from tests.security.payloads import MARK, SECRET
from tests.system import Process, System, running_system

CHAT = "/v1/chat/completions"
ANSWER_S_MAX = 120.0
AT_ONCE = 4
"""Requests in flight of an attack that sends many, one after another."""
SETTLE_S_MAX = 60.0
BUSY_LOOKS = 4
LIMIT_BYTES = 2**22
"""Buffer of an attacker's reader."""

OUTSIDE = "93.184.216.34"
"""The address of the hosts that may be asked; the image server on loopback answers for it."""
INSIDE = ("127.0.0.1", "10.0.0.7", "169.254.169.254", "::1", "0.0.0.0")
"""Addresses that must never be connected to; the image server would notice."""
T = TypeVar("T")

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(slots=True)
class AttackRun:
    """One attack in progress. `scale`: 1 is the full size. `wrong`: what was not as promised.

    `expected_traceback`: text of the log line before a traceback that is planned. `cached_bytes`: growth of
    the worker's caches, which is no cost of the attack.
    """

    system: System
    images: Images
    dice: random.Random
    scale: float
    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    expected_traceback: str | None = None
    cached_bytes: int = 0

    def scaled(self, full: int, least: int = 1) -> int:
        return max(least, round(full * self.scale))

    @property
    def worker(self) -> Process:
        return self.system.workers[-1]

    # --- requests ---

    async def send(self, data: bytes, *, own: socket.socket | None = None) -> Exchange:
        """Send a request on a new connection. `own`: a connected socket to use."""
        self.requests += 1
        if own is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.system.port, limit=LIMIT_BYTES)
        else:
            reader, writer = await asyncio.open_connection(sock=own, limit=1024)
        writer.write(data)
        return Exchange(reader, writer)

    async def answer_to(self, data: bytes) -> Answer | None:
        """Send a request and return its answer; None if the connection ended, or after `ANSWER_S_MAX`."""
        exchange = await self.send(data)
        try:
            return await exchange.answer()
        finally:
            exchange.leave()

    async def leave_after(self, data: bytes, after_s: float) -> None:
        """Run a client that disconnects before it has an answer."""
        exchange = await self.send(data)
        await asyncio.sleep(after_s)
        exchange.leave()

    async def leave_while_busy(self, data: bytes, after_s: float) -> None:
        """Run a client that disconnects `after_s` seconds after its request is in flight or answered."""
        exchange = await self.send(data)
        answer = asyncio.create_task(exchange.reader.read(1))
        deadline, looks = time.monotonic() + SETTLE_S_MAX, 0
        # Several looks, because a request of the probe may be in flight as well.
        while looks < BUSY_LOOKS and not answer.done():
            looks = looks + 1 if (await self._busy())[0] else 0
            if time.monotonic() > deadline:
                self.wrong.append("a request was neither in flight nor answered")
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(after_s)
        exchange.leave()
        await asyncio.gather(answer, return_exceptions=True)

    # --- checks ---

    def check(self, what: str, holds: bool) -> None:
        if not holds:
            self.wrong.append(what)

    async def check_answer(self, what: str, data: bytes, statuses: Collection[int]) -> Answer | None:
        """Send a request; its answer must have one of these statuses, and an error object from 400 on."""
        answer = await self.answer_to(data)
        if answer is None:
            self.wrong.append(f"{what}: no answer")
        elif fault := fault_of(answer, statuses):
            self.wrong.append(f"{what}: {fault}")
        return answer

    async def settle(self) -> None:
        """Wait until no request is in flight, at the gateway or the worker."""
        try:
            async with asyncio.timeout(SETTLE_S_MAX):
                while sum(await self._busy()) > 0:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self.wrong.append(f"requests are still in flight {SETTLE_S_MAX:g} s after the last client left")

    async def _busy(self) -> tuple[int, int]:
        """Return how many requests are in flight at the gateway, and at the worker."""
        answer = await self.answer_to(get("/v1/status"))
        self.requests -= 1  # it is none of the attack's
        if answer is None or answer.status != 200:
            return 1, 0  # it is too busy to say
        status = json.loads(answer.body)
        rows = sum(int(worker["running"] + worker["waiting"]) for worker in status["workers"])
        return int(status["gateway"]["in_flight"]), rows

    def check_processes(self) -> None:
        """Check that both processes live, and that their logs have no forged line or traceback."""
        for process in (self.system.gateway, self.worker):
            self.check(f"{process.name} died: {process.log()[-500:]}", process.running)
            self.wrong += [
                f"{process.name}: {fault}" for fault in log_faults(process.log(), self.expected_traceback)
            ]


@dataclass(slots=True)
class Exchange:
    """A connection with one request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> Answer | None:
        """Return the next answer; None if the connection ended before it, or after `ANSWER_S_MAX`."""
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await read_answer(self.reader, bare=False)
        except (TimeoutError, ConnectionError, ValueError):
            return None

    async def rest(self) -> bytes:
        """Return everything until the server closes the connection, or until `ANSWER_S_MAX`."""
        received = bytearray()
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                while piece := await self.reader.read(2**16):
                    received += piece
        except (TimeoutError, ConnectionError):
            pass
        return bytes(received)

    def leave(self) -> None:
        """Disconnect at once, without sending what is left."""
        self.writer.transport.abort()


async def for_each(items: Iterable[T], act: Callable[[T], Awaitable[None]], at_once: int = AT_ONCE) -> None:
    """Await `act` for each item, `at_once` of them at a time."""
    left = iter(items)

    async def work() -> None:
        for item in left:
            await act(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())


def post(path: str, body: bytes | dict[str, Any], *headers: bytes, version: str = "1.1") -> bytes:
    """Return the bytes of a request. `body`: JSON, or what becomes JSON."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/{version}".encode(),
        b"host: localhost",
        b"content-type: application/json",
        b"content-length: %d" % len(text),
        *headers,
    ]
    return b"\r\n".join([*lines, b"", text])


def get(path: str, *headers: bytes) -> bytes:
    return b"\r\n".join([f"GET {path} HTTP/1.1".encode(), b"host: localhost", *headers, b"", b""])


def fault_of(answer: Answer, statuses: Collection[int]) -> str | None:
    """Return what is wrong with the status, the error object or the headers of an answer."""
    if answer.status not in statuses:
        return f"status {answer.status}, not one of {sorted(statuses)}: {answer.body[:200]!r}"
    if "injected" in answer.headers:
        return "a header was injected"
    if answer.status < 400:
        return None
    try:
        document = json.loads(answer.body)
        error = document["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status} without an error object: {answer.body[:200]!r}"
    is_anthropics = document.get("type") == "error" and error.keys() == {"type", "message"}
    if not is_anthropics and (error.keys() < {"message", "type", "param", "code"} or not is_code(error)):
        return f"an incomplete error object: {error}"
    return None


def is_code(error: dict[str, Any]) -> bool:
    return bool(error["message"]) and error["code"] in set(Code)


def log_faults(log: str, expected_traceback: str | None = None) -> list[str]:
    """Return what must not be in a log: control characters, forged lines, prompts, tracebacks."""
    found = []
    before = ""
    for line in log.split("\n"):
        if _CONTROL.search(line):
            found.append(f"the log has a control character: {line[:200]!r}")
        if line.startswith(MARK):
            found.append(f"the log has a forged line: {line[:200]!r}")
        if SECRET in line:
            found.append(f"the log has a prompt: {line[:200]!r}")
        expected = expected_traceback is not None and expected_traceback in before
        if line.startswith("Traceback ") and not expected:
            found.append(f"the log has a traceback after {before!r}")
        before = line
    return found


PAGES: dict[str, bytes | str | int | None] = {
    "/secret": b"a secret of this host",
    "/to-loopback": "http://127.0.0.1/secret",
    "/to-metadata": "http://169.254.169.254/secret",
    "/to-six": "http://[::1]/secret",
    "/to-decimal": "http://2130706433/secret",
    "/to-name": "http://inside.test/secret",
    "/to-file": "file:///etc/passwd",
    "/to-userinfo": "http://pictures.test@127.0.0.1/secret",
    "/to-split": "//127.0.0.1/secret",
    "/loop": "/loop",
    "/text": b"hello",
}


@contextmanager
def attacked(folder: Path) -> Iterator[tuple[System, Images]]:
    """Run a gateway, which may fetch images from every public host, and a worker with the embedded model."""
    with serving_images(PAGES) as images:
        network: dict[str, object] = {
            "names": {
                "pictures.test": [OUTSIDE],
                "inside.test": ["10.0.0.7"],
                "both.test": [OUTSIDE, "127.0.0.1"],
                "metadata.google.internal": ["169.254.169.254"],
                "localhost": ["127.0.0.1"],
                "zero.test": ["0.0.0.0"],
                "six.test": ["::ffff:127.0.0.1"],
            },
            "addresses": dict.fromkeys((OUTSIDE, *INSIDE), images.port),
        }
        flags = ["--allow-media-hosts", "*", "--media-timeout", "2"]
        with running_system(folder, flags, network) as system:
            system.start_ready_worker(module="worker")
            yield system, images
