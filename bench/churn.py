"""Joins and leaves alone: rows that were prefilled before take turns in a batch of sixteen.

Every fourth step the oldest row leaves and another joins. Both sides get prefilled rows: ours as forks of
rows that are not started, upstream as prompt caches. So the time is that of decoding, joining and leaving.
"""

from __future__ import annotations

import itertools
from collections import deque
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generation_stream

from bench.cases import CHURN_ROWS, CHURN_STEPS, STEPS, TURNS, Bench, Line, churn_lengths
from bench.models import random_tokens
from bench.sides import GREEDY, prefilled
from bench.timing import Work, alternate, timed
from worker.interfaces import Engine

CHUNK = 512
TOKENS_MAX = 100_000
"""Upstream requires a limit; no row reaches it."""


class OurRows:
    """The engine itself; its prompts are prefilled once and forked for every row."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self._engine, self._prompts = engine, prompts
        self._numbers = itertools.count()
        self._live: deque[str] = deque()
        self._ready: deque[tuple[str, list[int]]] = deque()
        for index, prompt in enumerate(prompts):
            for at in range(0, len(prompt) - 1, CHUNK):
                engine.prefill({f"prompt {index}": prompt[at : min(at + CHUNK, len(prompt) - 1)]})
        self._prompt_bytes = engine.cache_bytes()
        self.prepare(CHURN_ROWS)
        for _ in range(CHURN_ROWS):
            self.join()

    def prepare(self, count: int) -> None:
        """Fork the next rows."""
        for number in itertools.islice(self._numbers, count):
            index = number % len(self._prompts)
            self._engine.fork(f"prompt {index}", f"row {number}")
            self._ready.append((f"row {number}", self._prompts[index]))

    def join(self) -> None:
        row, prompt = self._ready.popleft()
        self._engine.start(row, prompt, len(prompt), GREEDY)
        self._live.append(row)

    def leave(self) -> None:
        self._engine.drop(self._live.popleft())

    def step(self) -> int:
        """Return the number of tokens of one step."""
        return len(self._engine.step().tokens)

    def cache_bytes(self) -> int:
        """Return the bytes of the batch, without the forked prompts."""
        return self._engine.cache_bytes() - self._prompt_bytes

    def close(self) -> None:
        self._engine.reset()


class UpstreamRows:
    """`BatchGenerator` with prompt caches, which its own merge copies."""

    def __init__(self, network: Any, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self._caches = [prefilled(network, prompt[:-1]) for prompt in prompts]
        self._generator: Any = BatchGenerator(
            network, completion_batch_size=CHURN_ROWS, prefill_batch_size=CHURN_ROWS
        )
        self._numbers = itertools.count()
        self._live: deque[int] = deque()
        for _ in range(CHURN_ROWS):
            self.join()

    def prepare(self, count: int) -> None:
        """Do nothing: the caches exist."""

    def join(self) -> None:
        index = next(self._numbers) % len(self._prompts)
        prompt = self._prompts[index]
        self._live += self._generator.insert(
            [prompt[-1:]],
            max_tokens=[TOKENS_MAX],
            caches=[self._caches[index]],
            all_tokens=[list(prompt[:-1])],
        )

    def leave(self) -> None:
        self._generator.remove([self._live.popleft()])

    def step(self) -> int:
        """Return the number of tokens of one step."""
        return len(self._generator.next()[1])

    def cache_bytes(self) -> int:
        """Return the bytes of the batch."""
        return int(self._generator.prompt_cache_nbytes)

    def alone_bytes(self) -> int:
        """Return the bytes of the same rows' caches when separate, without the generated tokens."""
        newest = next(self._numbers)
        self._numbers = itertools.count(newest)
        rows = [self._caches[number % len(self._prompts)] for number in range(newest - CHURN_ROWS, newest)]
        return sum(cache.nbytes for row in rows for cache in row)

    def close(self) -> None:
        self._generator.close()


def _turn(rows: OurRows | UpstreamRows) -> Work:
    rows.prepare(STEPS // CHURN_STEPS)
    _wait()

    def work() -> int:
        tokens = 0
        for step in range(STEPS):
            if step % CHURN_STEPS == 0:
                rows.leave()
                rows.join()
            tokens += rows.step()
        _wait()
        return tokens

    return timed(work)


def _wait() -> None:
    mx.synchronize()
    mx.synchronize(generation_stream)


def churn(bench: Bench, rounds: int) -> tuple[Line, str]:
    """Return the row of the table, and a sentence on memory."""
    prompts = [random_tokens(length, seed) for seed, length in enumerate(churn_lengths(CHURN_ROWS))]
    ours, upstream = OurRows(bench.ours.engine, prompts), UpstreamRows(bench.network, prompts)
    try:
        sides = {"ours": partial(_turn, ours), "BatchGenerator": partial(_turn, upstream)}
        line = Line(f"{bench.name}, prefill left out", alternate(sides, rounds, TURNS))
        alone = upstream.alone_bytes()
        memory = (
            f"{bench.name}: bytes of the batch's caches over those of the same rows alone: "
            f"ours {ours.cache_bytes() / alone:.2f} (aim: at most 1.5), "
            f"BatchGenerator {upstream.cache_bytes() / alone:.2f}"
        )
        return line, memory
    finally:
        ours.close()
        upstream.close()
