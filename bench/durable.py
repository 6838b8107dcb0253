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
import time
import uuid
from collections.abc import Sequence

import httpx
import uvloop

from bench.gateway import Reader, chat_request, measure, scripted_gateway
from bench.timing import number, print_table, spread
from broker.journal.journal import IDLE_S
from deploy.load.runner import closed_loop
from tests.system import System

PLACE = b"KEY-OF-THE-STREAM"
CLIENTS = 32
POLL_S = 0.5
ROWS_MAX = 64
JOURNALS = {"off": "0", "on": "1G"}


class KeyedReader(Reader):
    """Sends its request with a key of its own."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        super().__init__(request.replace(PLACE, uuid.uuid4().hex[: len(PLACE)].encode()), done)


def compare(streams: int, step_ms: float, tokens: int, rounds: int, kinds: Sequence[str]) -> None:
    """Print events per CPU second of each kind of request, and the ratios to plain ones without a journal."""
    figures: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        systems = {
            name: stack.enter_context(scripted_gateway(streams, step_ms, "--journal-max", size))
            for name, size in JOURNALS.items()
        }
        for round in range(rounds + 1):
            for (name, system), kind in ((each, kind) for each in systems.items() for kind in kinds):
                headers = [f"idempotency-key: {PLACE.decode()}"] if kind == "keyed" else []
                request = chat_request(f"!tokens={tokens} !text=turntable·", *headers)
                done = measure(system.gateway.stats, system.port, request, streams, KeyedReader)
                if round:  # the first warms up
                    figures.setdefault((name, kind), []).append(done.per_cpu_second)
    plain = figures["off", kinds[0]]
    print_table(
        f"{streams} streams of {tokens} events, {step_ms:g} ms a step, {rounds} rounds",
        ["journal", "requests", "events per CPU second", "ratio"],
        [
            [
                name,
                kind,
                number(spread(values).median),
                str(spread([a / b for a, b in zip(values, plain, strict=True)])),
            ]
            for (name, kind), values in figures.items()
        ],
        f"Medians of the rounds (smallest-largest); ratios to {kinds[0]} requests without a journal.",
    )


def show(what: str, system: System) -> None:
    """Print the gateway's memory and the size of its journal."""
    folder = system.folder / "durable"
    size = sum(part.stat().st_size for part in folder.glob("*")) if folder.exists() else 0
    resident = system.gateway.stats.memory_info().rss
    print(f"{what:<24}{resident / 2**20:>8.0f} MiB resident, {size / 2**20:.1f} MiB on disk")


async def background(system: System, count: int) -> None:
    """Queue `count` responses, wait until all have ended, and delete them."""
    ids: list[str] = []
    async with httpx.AsyncClient(base_url=system.url, timeout=120) as client:

        async def create(number: int) -> None:
            body = {"input": f"number {number} !tokens=8", "background": True}
            ids.append((await client.post("/v1/responses", json=body)).raise_for_status().json()["id"])

        async def delete(number: int) -> None:
            await client.delete(f"/v1/responses/{ids[number]}")

        show("before", system)
        began = time.perf_counter()
        await closed_loop(range(count), create, CLIENTS)
        show(f"queued in {time.perf_counter() - began:.0f} s", system)
        while True:
            if not (await client.get("/v1/status")).json()["durable"]["running"]:
                break
            await asyncio.sleep(POLL_S)
        show(f"ended after {time.perf_counter() - began:.0f} s", system)
        await closed_loop(range(count), delete, CLIENTS)
        await asyncio.sleep(IDLE_S + 1)
        show("deleted", system)
        print(json.dumps((await client.get("/v1/status")).json()["durable"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
        flags = ["--journal-max", "1G", "--responses-max", str(given.background)]
        with scripted_gateway(ROWS_MAX, 0, *flags) as system:
            uvloop.run(background(system, given.background))
    else:
        compare(given.streams, given.step_ms, given.tokens, given.rounds, given.kinds.split(","))


if __name__ == "__main__":
    main()
