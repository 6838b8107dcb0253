"""Load runner: a constant number of requests in flight, or random arrivals at a given rate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import httpx

from deploy.load.client import Target, TargetError, ask, connected
from deploy.load.prompts import PromptShape, Scale, text
from deploy.load.samples import Sample

SCALE_WORDS = (20, 220)
"""Words of the two prompts that measure the tokens per word."""


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
            sample = await ask(http, target, text(PromptShape(words), Scale(0.0, 1.0), f"scale {words}"), 4)
            if sample.error:
                raise TargetError(f"{target.url} failed for model {target.model}: {sample.error}")
            counted.append(sample.prompt_tokens)
    return Scale.measured(SCALE_WORDS[1], counted[1], SCALE_WORDS[0], counted[0])


async def run(target: Target, load: Load, scale: Scale, seed: str) -> list[Sample]:
    """Run all requests of a load. `seed`: that of their words and arrival times."""
    texts = [text(load.shape, scale, seed, number) for number in range(load.requests)]
    async with connected(target) as http:
        if load.rate is not None:
            return await _arriving(http, target, load, texts, arrivals(load.requests, load.rate, seed))
        return await _closed_loop(http, target, load, iter(texts))


async def _closed_loop(
    http: httpx.AsyncClient, target: Target, load: Load, texts: Iterator[str]
) -> list[Sample]:
    samples: list[Sample] = []

    async def take() -> None:
        for each in texts:
            samples.append(await ask(http, target, each, load.answer_tokens))

    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency or 1):
            group.create_task(take())
    return samples


async def _arriving(
    http: httpx.AsyncClient, target: Target, load: Load, texts: Sequence[str], moments: Sequence[float]
) -> list[Sample]:
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def arrive(moment: float, words: str) -> Sample:
        await asyncio.sleep(max(0.0, began + moment - loop.time()))
        return await ask(http, target, words, load.answer_tokens)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(arrive(moment, words)) for moment, words in zip(moments, texts, strict=True)
        ]
    return [task.result() for task in tasks]


def arrivals(count: int, rate: float, seed: str) -> list[float]:
    """Return the arrival times of a Poisson process, in seconds from the start."""
    dice = random.Random(f"arrivals {seed}")
    return list(accumulate(dice.expovariate(rate) for _ in range(count)))
