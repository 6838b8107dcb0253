"""A client beside an attack, in a process of its own, so that the attacker's work does not delay it.

Until its standard input ends it sends “hi” and GET /health; then it prints the `Readings` as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import psutil

from tests.security.verdicts import Readings

PERIOD_S = 0.2
SAMPLE_S = 0.05
RETRY_S = 0.1
ANSWER_S_MAX = 120.0
"""A request that has no 200 after this time, with retries, counts as unanswered."""
BEGIN_S_MAX = 30.0

_HI = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
_CLOSE = b"host: localhost\r\nconnection: close\r\n"
HI = (
    b"POST /v1/chat/completions HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (_CLOSE, len(_HI), _HI)
)
HEALTH = b"GET /health HTTP/1.1\r\n%b\r\n" % _CLOSE


@dataclass(slots=True)
class _Latencies:
    """Latencies of one kind of request, with retries."""

    longest_s: float = 0.0
    answers: int = 0
    unanswered: int = 0


async def _succeeds(port: int, request: bytes) -> bool:
    """Return whether the server answers with a 200 on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await reader.read()
    finally:
        writer.close()
    return answer.startswith(b"HTTP/1.1 200")


async def _measure(port: int, request: bytes, into: _Latencies) -> None:
    """Send a request until it succeeds, and record how long that took in total."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            while not await _attempt(port, request):  # noqa: ASYNC110 - another process
                await asyncio.sleep(RETRY_S)
        into.answers += 1
    except TimeoutError:
        into.unanswered += 1
    into.longest_s = max(into.longest_s, time.monotonic() - began)


async def _attempt(port: int, request: bytes) -> bool:
    try:
        return await _succeeds(port, request)
    except OSError:
        return False


async def _repeat(port: int, request: bytes, into: _Latencies, over: asyncio.Event) -> None:
    while not over.is_set():
        next_at = time.monotonic() + PERIOD_S
        await _measure(port, request, into)
        await _pause(over, next_at - time.monotonic())


async def _pause(over: asyncio.Event, within_s: float) -> None:
    """Wait for the end, at most `within_s` seconds."""
    try:
        async with asyncio.timeout(max(0.0, within_s)):
            await over.wait()
    except TimeoutError:
        return


@dataclass(slots=True)
class _Memory:
    """Peak of a process's resident memory above its first sample."""

    process: psutil.Process
    calm: int = field(init=False)
    peak: int = field(init=False)

    def __post_init__(self) -> None:
        self.calm = self.peak = int(self.process.memory_info().rss)

    def sample(self) -> None:
        try:
            self.peak = max(self.peak, int(self.process.memory_info().rss))
        except psutil.NoSuchProcess:
            return  # the verdict on its death is the attack's

    @property
    def above_calm(self) -> int:
        return self.peak - self.calm


async def _sample(memories: Sequence[_Memory], over: asyncio.Event) -> None:
    while not over.is_set():
        for memory in memories:
            memory.sample()
        await _pause(over, SAMPLE_S)


async def observe(port: int, worker: int, gateway: int) -> Readings:
    """Probe until standard input ends."""
    over, hi, health = asyncio.Event(), _Latencies(), _Latencies()
    memories = [_Memory(psutil.Process(worker)), _Memory(psutil.Process(gateway))]
    print("ready", flush=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(_repeat(port, HI, hi, over))
        group.create_task(_repeat(port, HEALTH, health, over))
        group.create_task(_sample(memories, over))
        await asyncio.to_thread(sys.stdin.read)
        over.set()
    return Readings(
        hi_s=hi.longest_s,
        health_s=health.longest_s,
        worker_bytes=memories[0].above_calm,
        gateway_bytes=memories[1].above_calm,
        answers=hi.answers,
        unanswered=hi.unanswered + health.unanswered,
    )


class Probe:
    """The probe's process. `finish` ends it and returns its readings."""

    def __init__(self, port: int, worker: int, gateway: int) -> None:
        words = ["tests.security.probe", str(port), "--worker", str(worker), "--gateway", str(gateway)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise AssertionError("the probe did not start")

    def finish(self) -> Readings:
        """Raises `subprocess.TimeoutExpired`."""
        printed, _ = self._process.communicate(timeout=2 * ANSWER_S_MAX)
        return msgspec.json.decode(printed, type=Readings)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate(timeout=BEGIN_S_MAX)


@contextmanager
def probing(port: int, worker: int, gateway: int) -> Iterator[Probe]:
    """Run a probe; its process ends with the context."""
    probe = Probe(port, worker, gateway)
    try:
        yield probe
    finally:
        probe.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security.probe", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--gateway", type=int, required=True)
    given = parser.parse_args()
    readings = asyncio.run(observe(given.port, given.worker, given.gateway))
    sys.stdout.buffer.write(msgspec.json.encode(readings))


if __name__ == "__main__":
    main()
