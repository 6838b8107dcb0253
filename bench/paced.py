"""Gateway cost and latency of an event at a model's pace: one event per step and stream.

    python -m bench.paced [--streams 16] [--step-ms 5,20] [--seconds 8] [--rounds 5]

The scripted engine writes into each token the time of its creation (`!clock`), on the clock that all
processes of a machine share; the reader records how much later it arrives. The bare ASGI app does the same
with a timer in place of an engine: its cost is that of the socket and uvicorn. The difference is the cost of
transport and gateway: the worker's threads, ZeroMQ, dispatch, rendering. Both sides take turns. CPU: of the
serving process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import uvloop

from bench.gateway import Reader, http_request, read_all
from bench.processes import cpu_s, cpu_s_since, free_port, running, socket_folder, wait_for
from bench.timing import print_table
from deploy.load.samples import percentile

_STAMP = re.compile(rb'"content":"(\d+) "')
WARM_S = 1.0


class StampReader(Reader):
    """Records the age of each event on arrival; `late_ns` is shared by all readers."""

    def __init__(self, request: bytes, done: asyncio.Future[int], late_ns: list[int]) -> None:
        super().__init__(request, done)
        self._late_ns = late_ns
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        # An event may arrive in two parts; what follows the last line break is incomplete.
        text, _, self._rest = (self._rest + data).rpartition(b"\n")
        self._late_ns += [now - int(stamp) for stamp in _STAMP.findall(text)]
        super().data_received(data)


@dataclass(frozen=True)
class Turn:
    """One turn of a server: CPU time per event in µs, and latencies of events in ms."""

    cpu_us: float
    late_ms: Sequence[float]

    @property
    def p50(self) -> float:
        return percentile(self.late_ms, 50)

    @property
    def p99(self) -> float:
        return percentile(self.late_ms, 99)


def measure(server: psutil.Process, port: int, request: bytes, streams: int) -> Turn:
    """Run all streams at once to their ends."""
    late_ns: list[int] = []

    def reader(request: bytes, done: asyncio.Future[int]) -> Reader:
        return StampReader(request, done, late_ns)

    before = cpu_s(server)
    events = uvloop.run(read_all(port, request, streams, reader))
    return Turn(1e6 * cpu_s_since(before, server) / events, [late / 1e6 for late in late_ns])


Sides = tuple[list[Turn], list[Turn]]


def compare(streams: int, step_ms: float, seconds: float, rounds: int) -> Sides:
    """Measure gateway and bare app in turns; a short first round warms up and is left out."""
    port, bare_port = free_port(), free_port()
    with socket_folder() as folder:
        endpoint = f"ipc://{folder}/line"
        line = ["--endpoint", endpoint, "--log-level", "error"]
        fake_flags = [*line, "--max-running", str(streams), "--step-ms", str(step_ms)]
        with (
            running("broker", ["--port", str(port), *line]) as gateway,
            running("tests.scripted_worker", fake_flags),
            running("bench.bare", ["--port", str(bare_port)]) as bare,
        ):
            wait_for(f"http://127.0.0.1:{port}/ready")
            wait_for(f"http://127.0.0.1:{bare_port}/1")
            sides: Sides = [], []
            for number in range(rounds + 1):
                events = round(1000 * (seconds if number else WARM_S) / step_ms)
                ask_bare = http_request(f"GET /{events}/{step_ms}")
                sides[0].append(measure(gateway, port, _ask(events), streams))
                sides[1].append(measure(bare, bare_port, ask_bare, streams))
    return sides[0][1:], sides[1][1:]


def _ask(events: int) -> bytes:
    message = {"role": "user", "content": f"!tokens={events} !clock"}
    return http_request(
        "POST /v1/chat/completions", json.dumps({"stream": True, "messages": [message]}).encode()
    )


def _rows(step_ms: float, sides: Sides) -> list[list[str]]:
    ours, bare = sides
    rows = []
    for name, turns in (("gateway", ours), ("bare ASGI app", bare)):
        figures = [[t.cpu_us for t in turns], [t.p50 for t in turns], [t.p99 for t in turns]]
        rows.append([f"{step_ms:g} ms", name, *(_spread(of) for of in figures)])
    pairs = list(zip(ours, bare, strict=True))
    rows.append(
        [
            "",
            "ratio of CPU; added ms",
            _spread([mine.cpu_us / other.cpu_us for mine, other in pairs]),
            _spread([mine.p50 - other.p50 for mine, other in pairs]),
            _spread([mine.p99 - other.p99 for mine, other in pairs]),
        ]
    )
    return rows


def _spread(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.2f} ({min(figures):.2f}-{max(figures):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--step-ms", default="5,20")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for step_ms in map(float, options.step_ms.split(",")):
        rows += _rows(step_ms, compare(options.streams, step_ms, options.seconds, options.rounds))
    print_table(
        f"At a model's pace: {options.streams} streams, {options.rounds} rounds of {options.seconds:g} s",
        ["step", "", "CPU µs per event", "late ms, p50", "late ms, p99"],
        rows,
        "Medians of the rounds (smallest-largest). Aims: 20 µs; 2 ms added at p99.",
    )


if __name__ == "__main__":
    main()
