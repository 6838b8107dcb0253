"""Batches beside interactive streams, and alone: what they cost the streams, and how fast they run.

    python -m bench.batches [--model FOLDER] [--rounds 3] [--streams 4] [--lines 64] [--tokens 48] [--rows 16]

Each round, in turns on one server: the streams beside a batch that began before them, and alone before and
after that, as gaps between two tokens (p50, p95) and times to the first token; and a batch alone beside an
interactive load of the same requests, as many at once as the server has rows, as output tokens per second.
Texts of the batches must equal those of the load. Ratios are medians over the rounds. Bars: first token 1.1,
throughput 0.95; gaps grow with the rows that decode together, whoever asked for them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from bench.client import Answer, ask, client
from bench.rivals import Server, server
from bench.timing import print_table
from deploy.load.runner import closed_loop
from deploy.load.samples import percentile

CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.05
BATCH_S_MAX = 1800.0
SUBJECTS = ("rivers", "bridges", "clocks", "bread", "winter", "maps", "trains", "glass", "tea", "islands")


@dataclass
class Round:
    """Measurements of one round. `load` and `batch`: output tokens per second."""

    calm: list[Answer] = field(default_factory=list)
    beside: list[Answer] = field(default_factory=list)
    load: float = 0.0
    batch: float = 0.0
    done_beside: int = 0
    differences: int = 0


def prompts(count: int, seed: str) -> list[str]:
    """Return different short requests."""
    return [
        f"Write a few sentences about {SUBJECTS[n % len(SUBJECTS)]}, part {seed}-{n}." for n in range(count)
    ]


def body(text: str, tokens: int, salt: str) -> dict[str, Any]:
    """Return a request. `salt`: requests with another one share no cached prefixes with it."""
    messages = [{"role": "user", "content": text}]
    fields = {"temperature": 0, "ignore_eos": True, "cache_salt": salt}
    return {"messages": messages, "max_tokens": tokens, **fields}


async def begin(http: httpx.AsyncClient, texts: Iterable[str], tokens: int) -> str:
    """Upload a file of requests, create a batch of it, and return its id."""
    lines = [
        {"custom_id": str(n), "method": "POST", "url": CHAT, "body": body(text, tokens, "batch")}
        for n, text in enumerate(texts)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    uploaded = await http.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
    asked = {"input_file_id": uploaded.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    created = await http.post("/v1/batches", json=asked)
    created.raise_for_status()
    return str(created.json()["id"])


async def wait(http: httpx.AsyncClient, id: str, done: int | None = None) -> dict[str, Any]:
    """Wait until a batch is over, or has `done` answers."""
    async with asyncio.timeout(BATCH_S_MAX):
        while True:
            batch: dict[str, Any] = (await http.get(f"/v1/batches/{id}")).json()
            if batch["status"] in OVER or (done is not None and batch["request_counts"]["completed"] >= done):
                return batch
            await asyncio.sleep(POLL_S)


async def texts_of(http: httpx.AsyncClient, batch: dict[str, Any]) -> list[str]:
    content = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    bodies = [json.loads(line)["response"]["body"] for line in content.rstrip("\n").split("\n")]
    return [answer["choices"][0]["message"]["content"] for answer in bodies]


async def streams(http: httpx.AsyncClient, on: Server, count: int, tokens: int, seed: str) -> list[Answer]:
    """Run `count` streams at once, and each once more after its end."""

    async def one(text: str) -> list[Answer]:
        return [await ask(http, on, f"{text} {turn}", tokens, ignore_eos=True) for turn in range(2)]

    found = await asyncio.gather(*(one(text) for text in prompts(count, seed)))
    return [answer for answers in found for answer in answers]


async def load(
    http: httpx.AsyncClient, texts: Sequence[str], tokens: int, rows: int
) -> tuple[float, list[str]]:
    """Send whole requests, `rows` at once; return output tokens per second, and the answers."""

    async def post(text: str) -> dict[str, Any]:
        response = await http.post(CHAT, json=body(text, tokens, "load"))
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer

    began = time.perf_counter()
    answers = await closed_loop(texts, post, rows)
    seconds = time.perf_counter() - began
    total = sum(answer["usage"]["completion_tokens"] for answer in answers)
    said = [answer["choices"][0]["message"]["content"] for answer in answers]
    return total / seconds, said


async def alone(http: httpx.AsyncClient, texts: Sequence[str], tokens: int) -> tuple[float, list[str]]:
    """Run a batch alone; return output tokens per second from its creation to its end, and the texts."""
    began = time.perf_counter()
    batch = await wait(http, await begin(http, texts, tokens))
    seconds = time.perf_counter() - began
    return batch["usage"]["output_tokens"] / seconds, await texts_of(http, batch)


async def measure(on: Server, number: int, args: argparse.Namespace) -> Round:
    found = Round()
    async with client(on) as http:
        found.calm = await streams(http, on, args.streams, args.tokens, f"before {number}")
        texts = prompts(args.lines, f"beside {number}")
        id = await begin(http, texts, args.tokens)
        before = await wait(http, id, done=1)
        found.beside = await streams(http, on, args.streams, args.tokens, f"with {number}")
        after = (await http.get(f"/v1/batches/{id}")).json()
        found.done_beside = after["request_counts"]["completed"] - before["request_counts"]["completed"]
        texts_beside = await texts_of(http, await wait(http, id))
        found.calm += await streams(http, on, args.streams, args.tokens, f"after {number}")
        _, same = await load(http, texts, args.tokens, args.rows)
        texts = prompts(args.lines, f"load {number}")
        if number % 2:
            found.load, said = await load(http, texts, args.tokens, args.rows)
            found.batch, batched = await alone(http, texts, args.tokens)
        else:
            found.batch, batched = await alone(http, texts, args.tokens)
            found.load, said = await load(http, texts, args.tokens, args.rows)
        pairs = [*zip(texts_beside, same, strict=True), *zip(batched, said, strict=True)]
        found.differences = sum(ours != theirs for ours, theirs in pairs)
    return found


def gaps(answers: Sequence[Answer]) -> list[float]:
    return [after - before for answer in answers for before, after in pairwise(answer.pieces)]


def report(rounds: Sequence[Round]) -> None:
    figures = {
        "gap p50": [percentile(gaps(r.beside), 50) / percentile(gaps(r.calm), 50) for r in rounds],
        "gap p95": [percentile(gaps(r.beside), 95) / percentile(gaps(r.calm), 95) for r in rounds],
        "first token, median": [
            statistics.median(a.first_s for a in r.beside) / statistics.median(a.first_s for a in r.calm)
            for r in rounds
        ],
        "throughput of the batch": [r.batch / r.load for r in rounds],
    }
    bars = ("", "", "≤ 1.1", "≥ 0.95")
    rows = [
        (name, f"{statistics.median(values):.3f}", f"{min(values):.3f} to {max(values):.3f}", bar)
        for (name, values), bar in zip(figures.items(), bars, strict=True)
    ]
    legend = (
        f"Beside over alone, and batch over interactive load. Lines that ended beside the streams: "
        f"{[r.done_beside for r in rounds]}; texts that differ: {sum(r.differences for r in rounds)}."
    )
    print_table("Batches", ("figure", "median", "rounds", "bar"), rows, legend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".venv/models/smollm2"))
    for name, value in (("rounds", 3), ("streams", 4), ("lines", 64), ("tokens", 48), ("rows", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with (
        TemporaryDirectory() as folder,
        server(
            "roundhouse", args.model, args.rows, environ={"ROUNDHOUSE_BATCH_DIR": f"{folder}/batches"}
        ) as on,
    ):
        report([asyncio.run(measure(on, number, args)) for number in range(args.rounds)])


if __name__ == "__main__":
    main()
