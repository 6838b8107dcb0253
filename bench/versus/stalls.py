"""Effect of a long prompt on four running streams.

Gaps between the streams' pieces count from the sending of the prompt to its first text; earlier ones are
calm.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.client import Answer, ask, client
from bench.models import random_text
from bench.rivals import Server
from bench.versus.fleet import fleet
from bench.versus.results import Entry
from bench.versus.turns import Figure, Task, Values, entries, within
from deploy.load.samples import percentile

LINE = "gaps"
STREAMS, TEXT_TOKENS = 4, 116
PROMPT_TOKENS, STREAM_TOKENS = 4000, 400
"""Tokens of the long prompt, and of the streams' answers, which must outlast its prefill."""
CALM_PIECES = 48
"""Pieces of every stream before the long prompt is sent. The first half, while streams join, is left out."""
WARM_PROMPT_TOKENS, WARM_STREAM_TOKENS = 1000, 3 * CALM_PIECES
_BESIDE = f"beside a prompt of {PROMPT_TOKENS:,} tokens"
FIGURES = [
    Figure("calm", f"gap of {STREAMS} streams, calm, p99", "ms", "less"),
    Figure("p99", f"gap of {STREAMS} streams {_BESIDE}, p99", "ms", "less"),
    Figure("most", f"gap of {STREAMS} streams {_BESIDE}, longest", "ms", "less"),
    Figure("first", "first text of that prompt", "ms", "less"),
]


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line on one model."""
    with fleet(task.folder, task.names, STREAMS + 1) as up:

        def turn(server: Server, round: int) -> Values:
            return within(_watch(server, task.folder, round))

        yield entries(task.model, LINE, FIGURES, up.take_turns(turn, task.rounds), task.run)


async def _watch(server: Server, folder: Path, round: int) -> dict[str, float]:
    texts = [random_text(folder, TEXT_TOKENS, 1000 * round + number) for number in range(STREAMS)]
    long_text = random_text(folder, PROMPT_TOKENS if round else WARM_PROMPT_TOKENS, 1000 * round + STREAMS)
    most = STREAM_TOKENS if round else WARM_STREAM_TOKENS
    streams = [Answer(underway_pieces=CALM_PIECES) for _ in range(STREAMS)]
    async with client(server) as http, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(ask(http, server, text, most, stream))
            for text, stream in zip(texts, streams, strict=True)
        ]
        for stream in streams:
            await stream.underway.wait()
        long = await ask(http, server, long_text, 2)
        if ended := sum(task.done() for task in tasks):
            raise RuntimeError(f"{ended} of {STREAMS} streams ended before the prefill did")
    joined = max(stream.pieces[CALM_PIECES // 2] for stream in streams)
    before = [[at for at in each.pieces if at <= long.sent_at] for each in streams]
    calm = [gap for times in before for gap in gaps(times, joined, long.sent_at)]
    beside = [gap for each in streams for gap in gaps(each.pieces, long.sent_at, long.pieces[0])]
    return {
        "calm": 1000 * percentile(calm, 99),
        "p99": 1000 * percentile(beside, 99),
        "most": 1000 * max(beside),
        "first": 1000 * long.first_s,
    }


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Return the seconds between neighbouring `times`, for each gap that overlaps the span."""
    return [after - before for before, after in itertools.pairwise(times) if after > begin and before < end]
