"""What durable answers cost: CPU per event with and without the journal, and thousands in the background.

    python -m bench.durable [--streams 32] [--step-ms 10] [--tokens 400] [--rounds 3] [--background 0]

Two gateways, one with a journal and one without, take turns with streams of the scripted worker: plain ones,
and ones with an `Idempotency-Key`. The CPU is that of the gateway's process, the journal's thread included.
With `--background N` it instead queues N responses in the background, and shows memory and file before, when
all have ended, and when all are deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import uvloop

from bench.gateway import Reader, read_all
from bench.processes import cpu_s, cpu_s_since, free_port, running, socket_folder, wait_for
from broker.journal.journal import IDLE_S
from deploy.load.runner import closed_loop
from protocol.common.state_folder import JOURNAL_NAME

PLACE = b"KEY-OF-THE-STREAM"
CLIENTS = 32


class KeyedReader(Reader):
    """Sends its request with a key of its own."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        super().__init__(request.replace(PLACE, uuid.uuid4().hex[: len(PLACE)].encode()), done)


def request_of(tokens: int, *, keyed: bool) -> bytes:
    content = {"role": "user", "content": f"!tokens={tokens} !text=turntable·"}
    body = json.dumps({"stream": True, "messages": [content]}, ensure_ascii=False).encode()
    key = b"idempotency-key: " + PLACE + b"\r\n" if keyed else b""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n"
    return head % (key, len(body)) + body


def measure(server: psutil.Process, port: int, request: bytes, streams: int) -> float:
    """Return the events per CPU second of the gateway."""
    before = cpu_s(server)
    events = uvloop.run(read_all(port, request, streams, KeyedReader))
    return events / cpu_s_since(before, server)


def flags_of(folder: Path, name: str, port: int, journal_max: str) -> list[str]:
    """Return the flags of a gateway."""
    line = ["--port", str(port), "--endpoint", f"ipc://{folder}/{name}", "--log-level", "warning"]
    return [*line, "--journal-max", journal_max, "--journal-dir", str(folder / f"{name}-journal")]


def compare(streams: int, step_ms: float, tokens: int, rounds: int, kinds: Sequence[str]) -> None:
    """Print events per CPU second of each kind of request, and the ratios to plain ones without a journal."""
    figures: dict[tuple[str, str], list[float]] = {}
    with socket_folder() as folder, contextlib.ExitStack() as processes:
        gateways: dict[str, tuple[psutil.Process, int]] = {}
        for name, journal_max in (("off", "0"), ("on", "1G")):
            port = free_port()
            gateway = processes.enter_context(running("broker", flags_of(folder, name, port, journal_max)))
            worker = ["--endpoint", f"ipc://{folder}/{name}", "--max-running", str(streams)]
            processes.enter_context(
                running(
                    "tests.scripted_worker", [*worker, "--step-ms", str(step_ms), "--log-level", "warning"]
                )
            )
            wait_for(f"http://127.0.0.1:{port}/ready")
            gateways[name] = gateway, port
        for number in range(rounds + 1):
            for name, (gateway, port) in gateways.items():
                for kind in kinds:
                    request = request_of(tokens, keyed=kind == "keyed")
                    figure = measure(gateway, port, request, streams)
                    if number:  # the first round warms up
                        figures.setdefault((name, kind), []).append(figure)
    plain = statistics.median(figures["off", kinds[0]])
    print(f"{streams} streams of {tokens} events, {step_ms:g} ms a step, {rounds} rounds")
    for (name, kind), values in figures.items():
        median = statistics.median(values)
        spread = f"{min(values):,.0f}-{max(values):,.0f}"
        told = f"{median:>10,.0f} events per CPU second ({spread}), {median / plain:.2f}"
        print(f"journal {name:<4}{kind:<8}{told}")


def told(what: str, gateway: psutil.Process, file: Path) -> None:
    size = sum(part.stat().st_size for part in file.parent.glob("*")) if file.parent.exists() else 0
    print(f"{what:<24}{gateway.memory_info().rss / 2**20:>8.0f} MiB resident, {size / 2**20:.1f} MiB on disk")


async def background(url: str, count: int, gateway: psutil.Process, file: Path) -> None:
    """Queue `count` responses, wait until all have ended, and delete them."""
    ids: list[str] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def create(number: int) -> None:
            body = {"input": f"number {number} !tokens=8", "background": True}
            ids.append((await client.post("/v1/responses", json=body)).raise_for_status().json()["id"])

        async def delete(number: int) -> None:
            await client.delete(f"/v1/responses/{ids[number]}")

        told("before", gateway, file)
        began = time.perf_counter()
        await closed_loop(range(count), create, CLIENTS)
        told(f"queued in {time.perf_counter() - began:.0f} s", gateway, file)
        while True:
            durable = (await client.get("/v1/status")).json()["durable"]
            if not durable["running"]:
                break
            await asyncio.sleep(0.5)
        told(f"ended after {time.perf_counter() - began:.0f} s", gateway, file)
        await closed_loop(range(count), delete, CLIENTS)
        await asyncio.sleep(IDLE_S + 1)
        told("deleted", gateway, file)
        print(json.dumps((await client.get("/v1/status")).json()["durable"]))


def run_background(count: int) -> None:
    port = free_port()
    with socket_folder() as folder:
        flags = [*flags_of(folder, "on", port, "1G"), "--responses-max", str(count)]
        worker = ["--endpoint", f"ipc://{folder}/on", "--max-running", "64", "--log-level", "warning"]
        with running("broker", flags) as gateway, running("tests.scripted_worker", worker):
            wait_for(f"http://127.0.0.1:{port}/ready")
            file = folder / "on-journal" / JOURNAL_NAME
            uvloop.run(background(f"http://127.0.0.1:{port}", count, gateway, file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--kinds", default="plain,keyed", help="the journal forgets keyed answers after a minute"
    )
    parser.add_argument("--background", type=int, default=0)
    given = parser.parse_args()
    if given.background:
        run_background(given.background)
    else:
        compare(given.streams, given.step_ms, given.tokens, given.rounds, given.kinds.split(","))


if __name__ == "__main__":
    main()
