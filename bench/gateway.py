"""Throughput of the gateway: events per second, next to the same bytes from a bare ASGI app.

    python -m bench.gateway [--streams 32] [--events 8000] [--rounds 5]

The scripted engine sends as fast as it can. Both servers run under the same uvicorn with the same reader, in
turns, so that noise affects both. `per CPU second` divides by the serving process's own CPU time, and so
excludes the CPU that reader and engine take on a machine with few cores. At a model's pace events do not
accumulate, and each one is written by itself: see `bench.paced`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import psutil
import uvloop

from bench.processes import cpu_s, cpu_s_since, free_port, running, socket_folder, wait_for

EVENT = b'"delta":'
END = b"data: [DONE]"
OK = b"HTTP/1.1 200"


class Reader(asyncio.Protocol):
    """Sends one request, counts events until the last, and stores none."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        self._request, self._done = request, done
        self._events = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._events and not self._tail and not data.startswith(OK):
            self._done.set_exception(ConnectionError(f"refused: {data[:200]!r}"))
            self._transport.abort()
            return
        # A possible first part of a marker is searched again together with the next bytes.
        self._events += (self._tail[1 - len(EVENT) :] + data).count(EVENT)
        self._tail = (self._tail + data)[-64:]
        if END in self._tail and not self._done.done():
            self._done.set_result(self._events)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("closed before the last event"))


@dataclass(frozen=True)
class Round:
    """One measurement of one server."""

    events: int
    wall_s: float
    server_cpu_s: float

    @property
    def per_second(self) -> float:
        return self.events / self.wall_s

    @property
    def per_cpu_second(self) -> float:
        return self.events / self.server_cpu_s


MakeReader = Callable[[bytes, asyncio.Future[int]], Reader]


async def read_all(port: int, request: bytes, streams: int, make_reader: MakeReader = Reader) -> int:
    """Read all streams at once to their ends; return the sum of the readers' counts."""
    loop = asyncio.get_running_loop()
    counts = []
    for _ in range(streams):
        done: asyncio.Future[int] = loop.create_future()
        await loop.create_connection(partial(make_reader, request, done), "127.0.0.1", port)
        counts.append(done)
    return sum(await asyncio.gather(*counts))


def measure(server: psutil.Process, port: int, request: bytes, streams: int) -> Round:
    """Measure all streams at once, from sending the first request to reading the last byte."""
    cpu_before, began = cpu_s(server), time.perf_counter()
    events = uvloop.run(read_all(port, request, streams))
    return Round(events, time.perf_counter() - began, cpu_s_since(cpu_before, server))


def http_request(line: str, body: bytes = b"") -> bytes:
    """Return the bytes of an HTTP request. `line`: method and path."""
    head = f"{line} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def compare(streams: int, events: int, rounds: int) -> tuple[list[Round], list[Round]]:
    """Measure gateway and bare app in turns; the first round of each warms up and is left out."""
    port, bare_port = free_port(), free_port()
    content = {"role": "user", "content": f"!tokens={events} !text=turntable·"}
    body = json.dumps({"stream": True, "messages": [content]}, ensure_ascii=False).encode()
    ask, ask_bare = http_request("POST /v1/chat/completions", body), http_request(f"GET /{events}")
    with socket_folder() as folder:
        endpoint = f"ipc://{folder}/line"
        gateway_flags = ["--port", str(port), "--endpoint", endpoint, "--log-level", "warning"]
        fake_flags = ["--endpoint", endpoint, "--max-running", str(streams), "--log-level", "warning"]
        with (
            running("broker", gateway_flags) as gateway,
            running("tests.scripted_worker", fake_flags),
            running("bench.bare", ["--port", str(bare_port)]) as bare,
        ):
            wait_for(f"http://127.0.0.1:{port}/ready")
            wait_for(f"http://127.0.0.1:{bare_port}/1")
            ours, ceiling = [], []
            for _ in range(rounds + 1):
                ours.append(measure(gateway, port, ask, streams))
                ceiling.append(measure(bare, bare_port, ask_bare, streams))
    return ours[1:], ceiling[1:]


def _row(name: str, rounds: list[Round], value: Callable[[Round], float]) -> float:
    figures = sorted(value(each) for each in rounds)
    median = statistics.median(figures)
    print(f"{name:<34}{figures[0]:>12,.0f}{median:>12,.0f}{figures[-1]:>12,.0f}")
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--events", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ours, ceiling = compare(options.streams, options.events, options.rounds)
    print(f"{options.streams} streams of {options.events} events, {options.rounds} rounds")
    print(f"{'events per second':<34}{'min':>12}{'median':>12}{'max':>12}")
    wall = _row("gateway", ours, lambda r: r.per_second)
    wall_ceiling = _row("bare ASGI app", ceiling, lambda r: r.per_second)
    cpu = _row("gateway, per CPU second", ours, lambda r: r.per_cpu_second)
    cpu_ceiling = _row("bare ASGI app, per CPU second", ceiling, lambda r: r.per_cpu_second)
    print(f"gateway / bare: {wall / wall_ceiling:.2f} by wall clock, {cpu / cpu_ceiling:.2f} by CPU time")


if __name__ == "__main__":
    main()
