"""Effect of a long prompt on running streams: gaps between the pieces of four streams.

    python -m bench.gaps [--model dense] [--prompt-tokens 8000] [--rounds 3] [--servers ...]

A prompt of 8,000 tokens is sent while four streams are running. Gaps count from its sending to its first
text; earlier gaps are the calm ones. Every server has its default settings. The servers take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.client import Answer, ask, client
from bench.models import bench_folder, random_text
from bench.rivals import NAMES, Server, servers
from bench.timing import print_table
from deploy.load.samples import percentile

STREAMS = 4
STREAM_TOKENS = 1500
CALM_PIECES = 48
"""Pieces of every stream before the long prompt is sent. The first half, while streams join, is left out."""
TEXT_TOKENS = 116


@dataclass(frozen=True)
class Plan:
    """The length of the long prompt, and that of the answers, which must outlast its prefill."""

    prompt_tokens: int
    stream_tokens: int = STREAM_TOKENS


WARM_UP = Plan(1000, 3 * CALM_PIECES)


@dataclass
class Watched:
    """All rounds of one server. Times are in seconds."""

    calm: list[float] = field(default_factory=list)
    troubled: list[float] = field(default_factory=list)
    first_piece: list[float] = field(default_factory=list)
    outlived: int = 0
    """Streams that ended before the long prompt's first text; if there are any, the gaps are incomplete."""


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Return the seconds between neighbouring `times`, for each gap that overlaps the span from `begin` to
    `end`."""
    return [after - before for before, after in itertools.pairwise(times) if after > begin and before < end]


async def watch(server: Server, folder: Path, plan: Plan, seed: int, watched: Watched) -> None:
    """Run one round against one server."""
    streams = [Answer(underway_pieces=CALM_PIECES) for _ in range(STREAMS)]
    async with client(server) as http, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                ask(http, server, random_text(folder, TEXT_TOKENS, seed + number), plan.stream_tokens, stream)
            )
            for number, stream in enumerate(streams)
        ]
        for stream in streams:
            await stream.underway.wait()
        long = await ask(http, server, random_text(folder, plan.prompt_tokens, seed + STREAMS), 2)
        watched.outlived += sum(task.done() for task in tasks)
    asked, answered = long.sent_at, long.pieces[0]
    joined = max(stream.pieces[CALM_PIECES // 2] for stream in streams)
    watched.first_piece.append(long.first_s)
    for stream in streams:
        watched.calm += gaps([at for at in stream.pieces if at <= asked], joined, asked)
        watched.troubled += gaps(stream.pieces, asked, answered)


def report(model: str, prompt_tokens: int, rounds: int, results: dict[str, Watched]) -> None:
    """Print one table with a row per server, in milliseconds."""
    rows = []
    for name, watched in results.items():
        figures = [
            percentile(watched.calm, 50),
            percentile(watched.calm, 99),
            percentile(watched.troubled, 50),
            percentile(watched.troubled, 99),
            max(watched.troubled),
            statistics.median(watched.first_piece),
        ]
        rows.append([name, *(f"{1000 * figure:,.0f}" for figure in figures), str(watched.outlived)])
    columns = ["ms", "calm p50", "calm p99", "p50", "p99", "max", "first text", "ended before"]
    print_table(
        f"Gaps of {STREAMS} streams while {prompt_tokens} tokens prefill, {model}, {rounds} rounds together",
        columns,
        rows,
        "Columns: gaps between pieces in milliseconds, before the long prompt (calm) and while it prefills; "
        "the time to its own first text (median); streams that ended before that.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="dense")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", default=",".join(NAMES))
    options = parser.parse_args()
    folder = bench_folder(options.model)
    with servers(folder, STREAMS + 1, options.servers.split(",")) as up:
        for server in up:
            asyncio.run(watch(server, folder, WARM_UP, 0, Watched()))
        results = {server.name: Watched() for server in up}
        for number in range(1, options.rounds + 1):
            for server in up:
                plan = Plan(options.prompt_tokens)
                asyncio.run(watch(server, folder, plan, 1000 * number, results[server.name]))
    report(options.model, options.prompt_tokens, options.rounds, results)


if __name__ == "__main__":
    main()
