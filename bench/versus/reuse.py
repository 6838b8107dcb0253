"""Prefix reuse: an agent's turns, simultaneous requests with a common prefix, a second question about an
image. Prefix caches are on."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from bench.client import Answer, ask, client
from bench.conversation import TOOLS, Message, Texts, estranged, grown, opening
from bench.models import image_url, question
from bench.rivals import Server
from bench.versus.fleet import fleet
from bench.versus.results import Entry
from bench.versus.turns import Figure, Task, Values, entries, within

LINE = "reuse"
SYSTEM_TOKENS, TURNS, COLD_EVERY = 3000, 6, 2
QUESTION_TOKENS, CALL_TOKENS, RESULT_TOKENS, ANSWER_TOKENS, OTHER_WORDS = 50, 10, 100, 8, 4
CROWD, CROWD_TOKENS, CROWD_OWN_TOKENS = 16, 1500, 16
"""Requests at once, their shared tokens and their own. With these and the template's, 1.2 prompts of prefill
are the minimum."""
SEEDS_OF_ROUND = 10_000
IMAGE_SIDE = 96
FIGURES = [
    Figure("cold", "agent's turn without reuse, first text", "ms", "less"),
    Figure("warm", "agent's turn in its conversation, first text", "ms", "less"),
    Figure("cached", "prompt tokens of its turns from the cache, least", "%", "more"),
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
    async with client(server) as http:
        if not round:  # the warm-up
            return await _turns(http, server, texts, 2)
        return await _turns(http, server, texts, TURNS) | await _crowd(http, server, texts)


async def _say(http: httpx.AsyncClient, server: Server, messages: Sequence[Message]) -> Answer:
    # Set for all, since one server's default closes the reasoning in a way that no later prompt repeats.
    return await ask(http, server, messages, ANSWER_TOKENS, tools=TOOLS, enable_thinking=True)


async def _turns(http: httpx.AsyncClient, server: Server, texts: Texts, turns: int) -> dict[str, float]:
    """Run a conversation, then some of its prompts behind other first words, and so without reuse."""
    prompts = [opening(texts(SYSTEM_TOKENS), texts(QUESTION_TOKENS))]
    answers = [await _say(http, server, prompts[0])]
    while len(answers) < turns:
        prompts.append(grown(prompts[-1], answers[-1].text, texts(CALL_TOKENS), texts(RESULT_TOKENS)))
        answers.append(await _say(http, server, prompts[-1]))
    # At the end: between the turns these would evict the conversation from the cache.
    repeated = range(1, turns, COLD_EVERY)
    cold = [await _say(http, server, estranged(prompts[turn], texts(OTHER_WORDS))) for turn in repeated]
    found = {
        "cold": 1000 * statistics.median(answer.first_s for answer in cold),
        "warm": 1000 * statistics.median(answers[turn].first_s for turn in repeated),
    }
    shares = [_cached(answer) for answer in answers[1:]]
    known = [share for share in shares if share is not None]
    return found | ({"cached": 100 * min(known)} if len(known) == len(shares) else {})


def _cached(answer: Answer) -> float | None:
    return None if answer.cached_tokens is None else answer.cached_tokens / answer.prompt_tokens


async def _crowd(http: httpx.AsyncClient, server: Server, texts: Texts) -> dict[str, float]:
    """Send first requests that share most of their prompt, at once, behind one alone."""
    alone = await ask(http, server, opening(texts(CROWD_TOKENS), texts(CROWD_OWN_TOKENS)), 1)
    shared = texts(CROWD_TOKENS)
    crowd = [opening(shared, texts(CROWD_OWN_TOKENS)) for _ in range(CROWD)]
    answers = await asyncio.gather(*(ask(http, server, messages, 1) for messages in crowd))
    began = min(answer.sent_at for answer in answers)
    found = {"crowd": 1000 * (max(answer.pieces[0] for answer in answers) - began)}
    shares = [_cached(answer) for answer in answers]
    if any(share is None for share in shares):
        return found
    computed = sum(answer.prompt_tokens - (answer.cached_tokens or 0) for answer in answers)
    return found | {"computed": computed / alone.prompt_tokens}


async def _ask_twice(server: Server, round: int) -> dict[str, float]:
    urls = [image_url(IMAGE_SIDE, SEEDS_OF_ROUND * (1 + round) + number) for number in range(4)]
    found: dict[str, list[float]] = {"first": [], "second": []}
    words = ("Which colour is most of it?", "How many colours has it?")
    async with client(server) as http:
        for url, (name, text) in itertools.product(urls, zip(found, words, strict=True)):
            answer = await ask(http, server, question(text, [url]), 4, enable_thinking=True)
            found[name].append(1000 * answer.first_s)
    return {name: statistics.median(times) for name, times in found.items()}
