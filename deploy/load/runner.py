"""Load runner: a constant number of requests in flight, or random arrivals at a given rate.

Prompts are seeded random words, distinct except for a shared prefix. The number of tokens per word depends on
the server's tokenizer, and is measured with two requests (`Scale`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import httpx

from deploy.load.client import Target, TargetError, ask, connected
from deploy.load.samples import Rounds, Sample, Summary, summarize

SCALE_WORDS = (20, 220)
"""Words of the two prompts that measure the tokens per word."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Prompt = Sequence[Mapping[str, str]]
"""The messages of a prompt."""
Tell = Callable[[str], None]
"""Called with a description of the current measurement."""

_TEXT = (
    "the engine house stands beside a long track and every morning the night crew hands over to the day crew"
    " while coal water sand and oil are taken on board the driver reads the orders checks the brake and waits"
    " for the signal then slowly the wheels begin to turn past the tower over the bridge into the valley"
    " where farms rivers roads and small stations follow one another until late in the evening"
)
WORDS = tuple(_TEXT.split())
TOKENS_PER_WORD = 1.2
"""Assumption for plain English if it cannot be measured."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Token count of a server's prompts: `fixed` for its template plus `per_word` for each word."""

    fixed: float = 0.0
    per_word: float = TOKENS_PER_WORD

    @classmethod
    def measured(cls, words: int, tokens: int, other_words: int, other_tokens: int) -> Scale:
        """Compute the scale from the token counts of two prompts."""
        per_word = (tokens - other_tokens) / (words - other_words)
        if per_word <= 0:
            return cls()
        return cls(max(0.0, tokens - words * per_word), per_word)

    def words(self, tokens: int) -> int:
        """Return the number of words that make about `tokens` tokens, at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Length of a prompt in tokens. `shared`: the part of `prompt` that all prompts of a run have in common,
    as their system message."""

    prompt: int
    shared: int = 0


def prompt(shape: PromptShape, scale: Scale, seed: str, number: int = 0) -> Prompt:
    """Return the messages of a prompt. `seed`: that of the run and of what is shared; `number`: that of this
    prompt."""
    total = scale.words(shape.prompt)
    shared = min(total - 1, round(shape.shared / scale.per_word)) if shape.shared else 0
    own = {"role": "user", "content": " ".join(_drawn(total - shared, f"{seed} {number}"))}
    # A recurrent model can go on only from where a message ends.
    return [{"role": "system", "content": " ".join(_drawn(shared, seed))}, own] if shared else [own]


def _drawn(count: int, seed: str) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


@dataclass(frozen=True, slots=True)
class Load:
    """A load. `concurrency`: the number of requests in flight (closed loop). `rate`: instead, the mean number
    of Poisson arrivals per second (open loop). `shape`, `answer_tokens`: those of each request."""

    requests: int
    shape: PromptShape
    answer_tokens: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.concurrency} at once"


async def scale_of(target: Target) -> Scale:
    """Measure the tokens per word of a target. Raises `TargetError` if a request fails."""
    counted: list[int] = []
    async with connected(target) as http:
        for words in SCALE_WORDS:
            sample = await ask(http, target, prompt(PromptShape(words), Scale(0.0, 1.0), f"scale {words}"), 4)
            if sample.error:
                raise TargetError(f"{target.url} failed for model {target.model}: {sample.error}")
            counted.append(sample.prompt_tokens)
    return Scale.measured(SCALE_WORDS[1], counted[1], SCALE_WORDS[0], counted[0])


async def run(target: Target, load: Load, scale: Scale, seed: str) -> list[Sample]:
    """Run all requests of a load. `seed`: that of their words and arrival times."""
    prompts = [prompt(load.shape, scale, seed, number) for number in range(load.requests)]
    async with connected(target) as http:
        if load.rate is not None:
            return await _arriving(http, target, load, prompts, arrivals(load.requests, load.rate, seed))
        return await closed_loop(
            prompts, lambda each: ask(http, target, each, load.answer_tokens), load.concurrency or 1
        )


async def closed_loop(
    items: Iterable[Item], act: Callable[[Item], Awaitable[Result]], concurrency: int
) -> list[Result]:
    """Await `act` for each item, `concurrency` at once; return the results in the order of the items."""
    waiting = iter(enumerate(items))
    results: dict[int, Result] = {}

    async def take() -> None:
        for number, item in waiting:
            results[number] = await act(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(take())
    return [results[number] for number in sorted(results)]


async def _arriving(
    http: httpx.AsyncClient, target: Target, load: Load, prompts: Sequence[Prompt], moments: Sequence[float]
) -> list[Sample]:
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def arrive(moment: float, messages: Prompt) -> Sample:
        await asyncio.sleep(max(0.0, began + moment - loop.time()))
        return await ask(http, target, messages, load.answer_tokens)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(arrive(moment, each)) for moment, each in zip(moments, prompts, strict=True)
        ]
    return [task.result() for task in tasks]


def arrivals(count: int, rate: float, seed: str) -> list[float]:
    """Return the arrival times of a Poisson process, in seconds from the start."""
    dice = random.Random(f"arrivals {seed}")
    return list(accumulate(dice.expovariate(rate) for _ in range(count)))


async def measure(
    sides: Mapping[str, Target], loads: Sequence[Load], rounds: int, seed: str, tell: Tell
) -> list[tuple[Load, Rounds]]:
    """Measure each load in `rounds` rounds on every side, in alternating order. Two requests before the first
    round warm up each side and measure its tokens per word. Raises `TargetError`."""
    scales = {name: await scale_of(target) for name, target in sides.items()}
    results: list[tuple[Load, Rounds]] = []
    for place, load in enumerate(loads):
        found: dict[str, list[Summary]] = {name: [] for name in sides}
        for number in range(rounds):
            names = list(sides)[:: -1 if number % 2 else 1]
            for name in names:
                tell(f"{load.name}, {load.shape.prompt} tokens, round {number + 1} of {rounds}, {name}")
                # Different prompts in every round, load and side, so that no prefix is cached, not even if
                # two sides are two models of one server.
                words = f"{seed} {place} {number} {name}"
                samples = await run(sides[name], load, scales[name], words)
                found[name].append(summarize(samples))
        results.append((load, found))
    return results
