"""Clients that leave at random moments, and whether anything is left of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.faults.bodies import Answer
from tests.security.attacker import CHAT, AttackRun, for_each, get, post
from tests.security.payloads import chat, common_words
from tests.security.verdicts import MemorySample, growth_failure, unexplained

LEAVING = 20_000
ROUNDS = 6
"""The first one warms the server up."""
LEAVING_AT_ONCE = 8
REPORT_S = 0.6
"""A worker reports the size of its caches every 0.25 s."""
PHASES = ("head", "body", "queue", "stream", "document")
_MIB = 2**20


async def leaving_clients(run: AttackRun, count: int | None = None) -> None:
    """Send 20,000 requests, or `count`, whose clients leave at a random point; both processes must not grow
    beyond the bytes of their caches."""
    each = -(-(count or run.scaled(LEAVING, least=60)) // ROUNDS)
    workers, gateways, descriptors = [], [], []
    for _ in range(ROUNDS):
        await for_each(range(each), lambda _: _leave(run), LEAVING_AT_ONCE)
        await run.settle()
        await asyncio.sleep(REPORT_S)
        workers.append(MemorySample(_resident(run.worker.stats), await _cached(run)))
        gateways.append(MemorySample(_resident(run.system.gateway.stats)))
        descriptors.append(run.system.gateway.stats.num_fds())
    run.cached_bytes = workers[-1].cached
    for process, samples in (("worker", workers), ("gateway", gateways)):
        sizes = ", ".join(f"{s.resident / _MIB:.0f} ({s.cached / _MIB:.0f})" for s in samples)
        print(f"{process}, MiB after each round (and caches): {sizes}; unexplained: {unexplained(samples)} B")
        if fault := growth_failure(process, samples):
            run.wrong.append(fault)
    run.check(f"descriptors of the gateway: {descriptors}", descriptors[-1] <= descriptors[0] + 8)


async def _leave(run: AttackRun) -> None:
    """Run one client that leaves in a random phase of its exchange."""
    phase, dice = run.dice.choice(PHASES), run.dice
    body = chat(common_words(dice, dice.randrange(20, 1500)), stream=phase == "stream", ignore_eos=True)
    data = post(CHAT, body | {"max_tokens": dice.randrange(1, 48)})
    head = data.index(b"\r\n\r\n") + 4
    cut = {"head": dice.randrange(1, head), "body": dice.randrange(head, len(data))}.get(phase, len(data))
    try:
        exchange = await run.send(data[:cut])
    except OSError as error:
        run.wrong.append(f"a client could not connect: {error}")
        return
    try:
        if phase == "stream":
            async with asyncio.timeout(dice.uniform(0, 0.5)):
                await exchange.reader.readexactly(dice.randrange(1, 5000))
        else:
            await asyncio.sleep(dice.uniform(0, {"document": 0.3}.get(phase, 0.02)))
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        exchange.leave()


def _resident(stats: Any) -> int:
    return int(stats.memory_info().rss)


async def _cached(run: AttackRun) -> int:
    """Return the bytes of the worker's caches: prefixes, KV caches of rows and encoded images."""
    cache, status = [_document(await run.answer_to(get(path))) for path in ("/v1/cache", "/v1/status")]
    prefixes = sum(int(model["ram_bytes"]) for model in cache["data"])
    [worker] = status["workers"]
    return prefixes + int(worker["cache_bytes"]) + int((worker["images"] or {}).get("bytes", 0))


def _document(answer: Answer | None) -> Any:
    assert answer is not None
    assert answer.status == 200, answer.body[:500]
    return json.loads(answer.body)
