"""Prefix reuse: an agent's turns, simultaneous requests with a common prefix, a second question about an
image. Prefix caches are on."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.agent import CROWD, Plan, Texts, converse, draft_batch
from bench.client import ask, client
from bench.models import image_url, question
from bench.reuse import Trace
from bench.rivals import Server
from bench.versus.fleet import fleet
from bench.versus.results import Entry
from bench.versus.turns import Figure, Task, Values, entries, within

LINE = "reuse"
PLAN = Plan(system_tokens=3000, turns=6, cold=range(2, 7, 2))
WARM_UP = Plan(system_tokens=500, turns=2, cold=range(2, 3))
SEEDS_OF_ROUND = 10_000
IMAGE_SIDE = 96
FIGURES = [
    Figure("cold", "agent's turn without reuse, first text", "ms", "less"),
    Figure("warm", "agent's turn in its conversation, first text", "ms", "less"),
    Figure("crowd", f"{CROWD} at once that share 1,500 tokens, until all have text", "ms", "less"),
    Figure("computed", f"prompt tokens computed for these {CROWD}, relative to one", "x", "less"),
]
SEEING = [
    Figure("first", "first question about an image, first text", "ms", "less"),
    Figure("second", "second question about it, first text", "ms", "less"),
]


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line on one model."""
    with fleet(task.folder, task.names, CROWD, reuse=True) as up:

        def turn(server: Server, round: int) -> Values:
            return within(_ask_twice(server, round) if task.sees else _converse(server, task.folder, round))

        taken = up.take_turns(turn, task.rounds)
    yield entries(task.model, LINE, SEEING if task.sees else FIGURES, taken, task.run)


async def _converse(server: Server, folder: Path, round: int) -> dict[str, float]:
    texts = Texts(folder, SEEDS_OF_ROUND * round)
    if not round:
        return turns_ms(await converse(server, texts, WARM_UP))
    trace = await converse(server, texts, PLAN)
    crowd = await draft_batch(server, texts)
    said = {} if crowd.prefilled is None else {"computed": crowd.prefilled}
    return turns_ms(trace) | {"crowd": 1000 * crowd.all_s} | said


def turns_ms(trace: Trace) -> dict[str, float]:
    """Return the figures of the turns that were also sent without reuse."""
    warm_s = [trace.turns[number].first_text_s for number in trace.cold_s]
    return {
        "cold": 1000 * statistics.median(trace.cold_s.values()),
        "warm": 1000 * statistics.median(warm_s),
    }


async def _ask_twice(server: Server, round: int) -> dict[str, float]:
    urls = [image_url(IMAGE_SIDE, SEEDS_OF_ROUND * (1 + round) + number) for number in range(4)]
    found: dict[str, list[float]] = {"first": [], "second": []}
    words = ("Which colour is most of it?", "How many colours has it?")
    async with client(server) as http:
        for url, (name, text) in itertools.product(urls, zip(found, words, strict=True)):
            answer = await ask(http, server, question(text, [url]), 4, enable_thinking=True)
            found[name].append(1000 * answer.first_s)
    return {name: statistics.median(times) for name, times in found.items()}
