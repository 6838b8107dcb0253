"""Chats about real text with a model that talks, by the number of concurrent requests.

Prompts have about 40 to 700 tokens, the same on every side and new in every round. Answers end where the
model ends them.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
from collections.abc import Iterator, Sequence

from bench.client import burst
from bench.processes import tree_cpu_s
from bench.rivals import Server
from bench.versus.fleet import fleet
from bench.versus.results import Entry
from bench.versus.throughput import figures, values
from bench.versus.turns import Figure, Task, Values, entries, within

LINE = "chats"
CONCURRENCIES = (1, 4, 16, 48)
REQUESTS = {1: 2, 4: 8, 16: 16, 48: 48}
WARM_UP = 16
"""Maximum requests of the warm-up before the first round."""
MAX_TOKENS = 64
WORDS_MIN, WORDS_MAX = 15, 320
"""Words of the quoted text: about 40 to 700 tokens with the template and the question."""


def figures_at(at: int) -> list[Figure]:
    """Return the figures at a concurrency."""
    return [
        *figures(at),
        # A prompt that runs in one call stops all streams once, which the 99th percentile does not show.
        Figure("longest", "longest gap between pieces", "ms", "less", at),
        Figure("last", "first text, last of all", "ms", "less", at),
    ]


@functools.cache
def _text() -> Sequence[str]:
    """Return the words of Python's language reference, which every installation has."""
    return " ".join(pydoc_data.topics.topics.values()).split()


def prompts(count: int, first: int, words_min: int = WORDS_MIN, words_max: int = WORDS_MAX) -> list[str]:
    """Return `count` questions about different parts of the text, from short to long and mixed.

    `first`: number of the first part; other numbers give other parts.
    """
    text, found = _text(), []
    for number in range(count):
        size = words_min + (words_max - words_min) * (7 * number % count) // max(1, count - 1)
        begin = (first + number) * 613 % (len(text) - words_max)
        found.append(f"Explain this to a beginner:\n\n{' '.join(text[begin : begin + size])}")
    return found


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line, one concurrency after another."""
    with fleet(task.folder, task.names, max(CONCURRENCIES)) as up:
        for at in task.concurrencies or CONCURRENCIES:

            def turn(server: Server, round: int, at: int = at) -> Values:
                count = REQUESTS[at] if round else min(at, WARM_UP)
                return within(measure_burst(server, prompts(count, 1000 * at + 50 * round), at, MAX_TOKENS))

            yield entries(task.model, LINE, figures_at(at), up.take_turns(turn, task.rounds), task.run)


async def measure_burst(server: Server, texts: Sequence[str], at: int, max_tokens: int) -> dict[str, float]:
    """Return the figures of `texts`, sent `at` at once. `last`: the longest time to a first text."""
    before = tree_cpu_s(server.process)
    own = {"ignore_eos": False} if "ignore_eos" in server.fields else {}
    work, answers = await burst(server, texts, at, max_tokens, **own)
    found = values(answers, work.rate, tree_cpu_s(server.process) - before)
    return {**found, "last": 1000 * max(answer.first_s for answer in answers)}
