"""Memory growth over two thousand requests in a row.

    python -m bench.soak [--requests 2000] [--model hybrid-small] [--concurrency 4]

Short requests of many lengths over HTTP; every tenth client disconnects in the middle. The resident memory of
gateway and worker is sampled after a batch of requests, when nothing runs. The first fifth warms up. A slope
is in bytes per request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
from collections.abc import Sequence

import httpx

from bench.client import Answer, ask, client
from bench.models import NAMES, bench_folder, random_text
from bench.rivals import Server, server
from bench.timing import fit_slope, print_table
from deploy.load.runner import closed_loop

BATCH = 20
WARM_PART = 0.2
LEAVE_EVERY = 10
PROMPT_TOKENS = (5, 200)
ANSWER_TOKENS = (1, 32)

Samples = dict[str, list[float]]
"""Bytes after each batch, for each kind of memory."""


def lengths(number: int) -> tuple[int, int]:
    """Return the prompt and answer tokens of a request, by its number."""
    sampling = random.Random(number)
    return sampling.randint(*PROMPT_TOKENS), sampling.randint(*ANSWER_TOKENS)


def resident(server: Server) -> dict[str, float]:
    """Return the resident bytes of the gateway and the worker below the supervisor."""
    found = {}
    for child in server.process.children(recursive=True):
        for module in ("broker", "worker"):
            if module in child.cmdline():
                found[f"{module}, resident"] = float(child.memory_info().rss)
    return found


async def _one(http: httpx.AsyncClient, server: Server, text: str, number: int) -> None:
    _, max_tokens = lengths(number)
    answer = Answer()
    if number % LEAVE_EVERY:
        await ask(http, server, text, max_tokens, answer)
        return
    # Long enough to disconnect in the middle.
    leaving = asyncio.create_task(ask(http, server, text, 10 * ANSWER_TOKENS[1], answer))
    await answer.underway.wait()
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving


async def soak(server: Server, texts: Sequence[str], concurrency: int) -> Samples:
    """Send all `texts`, `concurrency` at once, in batches."""
    samples: Samples = {}
    async with client(server) as http:
        for first in range(0, len(texts), BATCH):
            numbers = range(first, min(first + BATCH, len(texts)))
            await closed_loop(numbers, lambda at: _one(http, server, texts[at], at), concurrency)
            for name, size in resident(server).items():
                samples.setdefault(name, []).append(size)
    return samples


def report(title: str, samples: Samples) -> None:
    """Print one table with a row for each kind of memory."""
    rows = []
    for name, sizes in samples.items():
        warm = int(len(sizes) * WARM_PART)
        requests = [float(BATCH * number) for number in range(warm, len(sizes))]
        slope = fit_slope(requests, sizes[warm:])
        levels = [f"{sizes[at] / 2**20:,.1f}" for at in (0, warm, -1)]
        rows.append([name, *levels, f"{slope.rise:+,.0f} ± {slope.margin:,.0f}"])
    print_table(
        title,
        ["", "first, MiB", "warm, MiB", "last, MiB", "bytes per request"],
        rows,
        "Columns: memory after the first batch, when warm, and at the end; the slope from warm to the end "
        "with its 95% interval; no growth if that contains 0.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="at least 240")
    parser.add_argument("--model", default="hybrid-small", choices=NAMES)
    parser.add_argument("--concurrency", type=int, default=4)
    options = parser.parse_args()
    # A prefix cache grows until it is full. At these sizes it is full before the warm-up ends.
    os.environ |= {"ROUNDHOUSE_PREFIX_CACHE_RAM": "16MiB", "ROUNDHOUSE_PREFIX_CACHE_DISK": "32MiB"}
    folder = bench_folder(options.model)
    texts = [random_text(folder, lengths(number)[0], number) for number in range(options.requests)]
    with server("roundhouse", folder, options.concurrency) as up:
        samples = asyncio.run(soak(up, texts, options.concurrency))
    report(f"{options.requests} requests, {options.concurrency} at once, {options.model}", samples)


if __name__ == "__main__":
    main()
