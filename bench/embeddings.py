"""Effect of a long embedding request on running streams: 1,000 texts beside four streams.

    python -m bench.embeddings [--texts 1000] [--words 60] [--rounds 3]

A chat model and an embedding model (two layers, 128 wide, as BERT-Tiny), each with its worker, behind one
gateway. Gaps between the pieces of the streams count from the sending of the list to its answer; earlier gaps
are the calm ones. The list is then embedded once more without any streams.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.client import Answer, ask, client
from bench.gaps import STREAMS, TEXT_TOKENS, gaps
from bench.models import bench_folder, random_text
from bench.processes import free_port, running, socket_folder, wait_for
from bench.rivals import Server
from bench.timing import print_table
from deploy.load.samples import percentile
from tests.models.corpus import make_corpus
from tests.models.encoders import make_encoder

STREAM_TOKENS = 4000
CALM_PIECES = 400
"""Pieces of every stream before the list is sent. The first tenth, while streams join, is left out."""
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
CHAT, TEXTS = "chat", "texts"


@dataclass
class Watched:
    """All rounds. Times are in seconds."""

    calm: list[float] = field(default_factory=list)
    troubled: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    outlived: int = 0
    """Streams that ended before the list was answered; if there are any, the gaps are incomplete."""


def texts_of(count: int, words: int, seed: int) -> list[str]:
    """Return `count` texts of one to `words` words each."""
    rng = random.Random(seed)
    known = " ".join(make_corpus(500, seed)).split()
    return [" ".join(rng.choices(known, k=rng.randint(1, words))) for _ in range(count)]


async def embed(http: httpx.AsyncClient, texts: Sequence[str]) -> tuple[float, float]:
    """Return the times at which the request was sent and its answer had arrived."""
    sent = time.perf_counter()
    body = {"model": TEXTS, "input": list(texts), "encoding_format": "base64"}
    answer = await http.post("/v1/embeddings", json=body)
    answer.raise_for_status()
    assert len(answer.json()["data"]) == len(texts)
    return sent, time.perf_counter()


async def watch(server: Server, folder: Path, texts: Sequence[str], seed: int, watched: Watched) -> None:
    """Run one round."""
    streams = [Answer(underway_pieces=CALM_PIECES) for _ in range(STREAMS)]
    async with client(server) as http:
        asking = [
            asyncio.create_task(
                ask(
                    http,
                    server,
                    random_text(folder, TEXT_TOKENS, seed + number),
                    STREAM_TOKENS,
                    stream,
                    model=CHAT,
                )
            )
            for number, stream in enumerate(streams)
        ]
        for stream in streams:
            await stream.underway.wait()
        sent, answered = await embed(http, texts)
        watched.outlived += sum(task.done() for task in asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        alone = await embed(http, texts)
    joined = max(stream.pieces[CALM_PIECES // 10] for stream in streams)
    for stream in streams:
        watched.calm += gaps([at for at in stream.pieces if at <= sent], joined, sent)
        watched.troubled += gaps(stream.pieces, sent, answered)
    watched.beside.append(answered - sent)
    watched.alone.append(alone[1] - alone[0])


@contextmanager
def _served(chat: Path) -> Iterator[Server]:
    embedder = Path(tempfile.mkdtemp(prefix="bench-embedder-"))
    port = free_port()
    try:
        make_encoder("bert-embedder", embedder, **WIDE)
        with socket_folder() as own:
            flags = ["serve", f"--port={port}", f"--model={CHAT}={chat}", f"--model={TEXTS}={embedder}"]
            flags += [f"--endpoint=ipc://{own}/line", f"--prefix-cache-dir={own}/prefixes"]
            with running("deploy", [*flags, "--log-level=warning"]) as process:
                url = f"http://127.0.0.1:{port}"
                wait_for(f"{url}/ready", process)
                yield Server("roundhouse", url, process, {"ignore_eos": True})
    finally:
        shutil.rmtree(embedder, ignore_errors=True)


def report(watched: Watched, texts: int, rounds: int) -> None:
    """Print one table, in milliseconds and seconds."""
    figures = [
        percentile(watched.calm, 50),
        percentile(watched.calm, 99),
        percentile(watched.troubled, 50),
        percentile(watched.troubled, 99),
        max(watched.troubled),
    ]
    row = [f"{1000 * figure:,.0f}" for figure in figures]
    row += [f"{statistics.median(side):.1f}" for side in (watched.beside, watched.alone)]
    print_table(
        f"Gaps of {STREAMS} streams while {texts} texts are embedded, {rounds} rounds together",
        ["", "calm p50", "calm p99", "p50", "p99", "max", "list beside", "list alone", "ended before"],
        [["ms, s", *row, str(watched.outlived)]],
        "Columns: gaps between pieces in milliseconds, before the list (calm) and beside it; seconds to "
        "embed it beside the streams and alone (medians); streams that ended before it.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    chat = bench_folder("dense")
    watched = Watched()
    with _served(chat) as server:
        for number in range(options.rounds + 1):
            texts = texts_of(options.texts, options.words, number)
            asyncio.run(watch(server, chat, texts, 1000 * number, watched if number else Watched()))
    report(watched, options.texts, options.rounds)


if __name__ == "__main__":
    main()
