"""Cost of the gateway: events per second and CPU per event, next to the same bytes from a bare ASGI app.

    python -m bench.gateway [--streams 32] [--events 8000] [--step-ms 0,5] [--seconds 8] [--rounds 5]

The scripted engine sends as fast as it can (`--step-ms 0`), or one event per step and stream, as a model
does: then nothing accumulates, and each event is written by itself. Both servers run under the same uvicorn
with the same reader, in turns, so that noise affects both. CPU is that of the serving process alone. At a
model's pace the engine writes into each token the time of its creation (`!clock`), on the clock that all
processes of a machine share; the reader records how much later it arrives. The bare app does so with a timer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import httpx
import psutil
import uvloop

from bench.processes import cpu_s, cpu_s_since
from bench.timing import number, print_table, spread
from deploy.load.samples import percentile
from tests.ports import free_port
from tests.system import Process, System, eventually, running_system

EVENT = b'"delta":'
END = b"data: [DONE]"
OK = b"HTTP/1.1 200"
STAMP = re.compile(rb'"content":"(\d+) "')
WARM_PART = 8
"""The first round has this part of the events, warms up, and is left out."""
START_S_MAX = 60.0


class Reader(asyncio.Protocol):
    """Sends one request, counts events until the last, and stores none. `late_ns`: ages of stamped events on
    arrival, shared by all readers."""

    def __init__(self, request: bytes, done: asyncio.Future[int], late_ns: list[int] | None = None) -> None:
        self._request, self._done, self._late_ns = request, done, late_ns
        self._events = 0
        self._tail = self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._late_ns is not None:
            self._note(data, self._late_ns)
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

    def _note(self, data: bytes, late_ns: list[int]) -> None:
        now = time.monotonic_ns()
        # An event may arrive in two parts; what follows the last line break is incomplete.
        text, _, self._rest = (self._rest + data).rpartition(b"\n")
        late_ns += [now - int(stamp) for stamp in STAMP.findall(text)]

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("closed before the last event"))


@dataclass(frozen=True)
class Round:
    """One measurement of one server. `late_ms`: ages of the events on arrival, at a model's pace."""

    events: int
    wall_s: float
    server_cpu_s: float
    late_ms: Sequence[float] = ()

    @property
    def per_second(self) -> float:
        return self.events / self.wall_s

    @property
    def per_cpu_second(self) -> float:
        return self.events / self.server_cpu_s

    def late(self, percent: float) -> float:
        """Return a percentile of the ages, in milliseconds."""
        return percentile(self.late_ms, percent)


MakeReader = Callable[[bytes, asyncio.Future[int]], Reader]


async def read_all(port: int, request: bytes, streams: int, make_reader: MakeReader) -> int:
    """Read all streams at once to their ends; return the sum of the readers' counts."""
    loop = asyncio.get_running_loop()
    counts = []
    for _ in range(streams):
        done: asyncio.Future[int] = loop.create_future()
        await loop.create_connection(partial(make_reader, request, done), "127.0.0.1", port)
        counts.append(done)
    return sum(await asyncio.gather(*counts))


def measure(
    server: psutil.Process, port: int, request: bytes, streams: int, make_reader: MakeReader = Reader
) -> Round:
    """Measure all streams at once, from sending the first request to reading the last byte."""
    cpu_before, began = cpu_s(server), time.perf_counter()
    events = uvloop.run(read_all(port, request, streams, make_reader))
    return Round(events, time.perf_counter() - began, cpu_s_since(cpu_before, server))


def http_request(line: str, body: bytes = b"", *headers: str) -> bytes:
    """Return the bytes of an HTTP request. `line`: method and path."""
    head = [f"{line} HTTP/1.1", "host: localhost", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(head).encode() + body


def chat_request(script: str, *headers: str) -> bytes:
    """Return a streamed chat request to the scripted engine."""
    document = {"stream": True, "messages": [{"role": "user", "content": script}]}
    body = json.dumps(document, ensure_ascii=False).encode()
    return http_request("POST /v1/chat/completions", body, *headers)


@contextlib.contextmanager
def scripted_gateway(streams: int, step_ms: float, *flags: str) -> Iterator[System]:
    """Run a gateway with further `flags` and a scripted engine with a row for each stream."""
    quiet = ["--log-level", "warning"]
    with (
        tempfile.TemporaryDirectory(prefix="rh-") as folder,
        running_system(Path(folder), [*quiet, *flags]) as system,
    ):
        system.start_ready_worker("--max-running", str(streams), "--step-ms", str(step_ms), *quiet)
        yield system


@contextlib.contextmanager
def bare_app(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Run the bare app; yield its process and its port."""
    port = free_port()
    process = Process("bare", ["bench.bare", "--port", str(port)], folder)

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/1").status_code == 200
        return False

    try:
        eventually(answers, within_s=START_S_MAX, what="the bare app answers")
        yield process.stats, port
    finally:
        process.stop()


def compare(streams: int, events: int, rounds: int, step_ms: float = 0.0) -> tuple[list[Round], list[Round]]:
    """Measure gateway and bare app in turns."""
    ours: list[Round] = []
    ceiling: list[Round] = []
    with scripted_gateway(streams, step_ms) as system, bare_app(system.folder) as (bare, bare_port):
        for number in range(rounds + 1):
            count = events if number else max(1, events // WARM_PART)
            script = f"!tokens={count} !clock" if step_ms else f"!tokens={count} !text=turntable·"
            path = f"/{count}/{step_ms}" if step_ms else f"/{count}"
            turns = (
                (ours, system.gateway.stats, system.port, chat_request(script)),
                (ceiling, bare, bare_port, http_request(f"GET {path}")),
            )
            for done, server, port, request in turns:
                done.append(_turn(server, port, request, streams))
    return ours[1:], ceiling[1:]


def _turn(server: psutil.Process, port: int, request: bytes, streams: int) -> Round:
    late_ns: list[int] = []
    found = measure(server, port, request, streams, partial(Reader, late_ns=late_ns))
    return Round(found.events, found.wall_s, found.server_cpu_s, [late / 1e6 for late in late_ns])


def table_rows(pace: str, ours: Sequence[Round], ceiling: Sequence[Round]) -> list[list[str]]:
    """Return the rows of one pace: both servers, and the ratios of the first to the second."""
    pairs = list(zip(ours, ceiling, strict=True))
    rows = []
    for name, done in (("gateway", ours), ("bare ASGI app", ceiling)):
        figures = [
            [each.per_second for each in done],
            [each.per_cpu_second for each in done],
            [1e6 / each.per_cpu_second for each in done],
            *([each.late(percent) for each in done if each.late_ms] for percent in (50, 99)),
        ]
        rows.append([pace, name, *(number(spread(each).median) if each else "" for each in figures)])
    ratios = [
        str(spread([mine.per_second / bare.per_second for mine, bare in pairs])),
        str(spread([mine.per_cpu_second / bare.per_cpu_second for mine, bare in pairs])),
        str(spread([bare.per_cpu_second / mine.per_cpu_second for mine, bare in pairs])),
    ]
    added = [
        str(spread([mine.late(percent) - bare.late(percent) for mine, bare in pairs]))
        if ours[0].late_ms
        else ""
        for percent in (50, 99)
    ]
    return [*rows, ["", "gateway / bare, added ms", *ratios, *added]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--events", type=int, default=8000, help="of a stream, as fast as possible")
    parser.add_argument("--step-ms", default="0", help="0: as fast as possible")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round at a model's pace")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for step_ms in map(float, options.step_ms.split(",")):
        events = round(1000 * options.seconds / step_ms) if step_ms else options.events
        pace = f"{step_ms:g} ms a step" if step_ms else "full speed"
        rows += table_rows(pace, *compare(options.streams, events, options.rounds, step_ms))
    print_table(
        f"The gateway, {options.streams} streams, {options.rounds} rounds",
        ["", "", "events/s", "per CPU second", "CPU µs per event", "late ms, p50", "late ms, p99"],
        rows,
        "Medians of the rounds; ratios and added milliseconds with the smallest and the largest. At a model's"
        " pace the aims are 20 µs, and 2 ms added at p99.",
    )


if __name__ == "__main__":
    main()
