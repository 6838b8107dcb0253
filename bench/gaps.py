"""Effect of a long prompt on running streams: gaps between the pieces of four streams.

A long prompt is sent while four streams are running. Gaps count from its sending to its first text; earlier
gaps are the calm ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.client import Answer, ask, client
from bench.models import random_text
from bench.rivals import Server

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
