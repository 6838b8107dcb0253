"""The engine against upstream alone: tokens are equal however rows join, leave and are chunked."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_tokenizer

from tests.models.fixtures import model_folder
from tests.worker.probed_networks import MODELS, engine_of, network
from worker.runner import prefill as prefill_module
from worker.runner.kv.batch import prefill_abreast
from worker.runner.kv.capability_probe import BatchCapabilities
from worker.runner.runner import BatchEngine
from worker.values import NO_LAST, NO_TARGETS, SamplingParams

WINDOW = 32
"""Attention window of the sliding model, in tokens."""
GREEDY = SamplingParams()


@dataclass(frozen=True)
class Job:
    name: str
    prompt: tuple[int, ...]
    tokens: int
    sampling: SamplingParams = GREEDY


@cache
def endless_tokenizer(name: str) -> Any:
    tokenizer = load_tokenizer(model_folder(name))
    tokenizer.eos_token_ids = ()
    return tokenizer


def alone(name: str, job: Job) -> list[int]:
    """Return the tokens of upstream's own generator."""
    answers = stream_generate(
        network(name), endless_tokenizer(name), list(job.prompt), max_tokens=job.tokens, prefill_step_size=512
    )
    return [answer.token for answer in answers][: job.tokens]


def play(
    engine: BatchEngine,
    jobs: Sequence[Job],
    rng: random.Random,
    prefilled: Mapping[str, int] | None = None,
) -> dict[str, list[int]]:
    """Run the jobs: they join at random steps, prefill in random chunks and leave when done. `prefilled`:
    computed prompt tokens of the jobs whose prefill has begun."""
    prefilled = dict(prefilled or {})
    waiting = [job for job in jobs if job.name not in prefilled]
    by_name = {job.name: job for job in jobs}
    answers: dict[str, list[int]] = {}
    while waiting or prefilled or any(len(answers[n]) < by_name[n].tokens for n in answers):
        if waiting and rng.random() < 0.35:
            prefilled[waiting.pop(0).name] = 0
        for name in list(prefilled):
            job, done = by_name[name], prefilled[name]
            chunk = job.prompt[done : min(done + rng.randint(1, 45), len(job.prompt) - 1)]
            is_last = done + len(chunk) == len(job.prompt) - 1
            if chunk:
                last = {name: job.prompt[-1]} if is_last and rng.random() < 0.5 else NO_LAST
                engine.prefill({name: chunk}, NO_TARGETS, last)
                prefilled[name] += len(chunk)
            if is_last:
                first = engine.start(name, job.prompt, len(job.prompt), job.sampling)
                answers[name] = list(first.tokens.values())
                del prefilled[name]
                if len(answers[name]) == job.tokens:
                    engine.drop(name)
        for name, token in engine.step().tokens.items():
            answers[name].append(token)
            if len(answers[name]) == by_name[name].tokens:
                engine.drop(name)
    return answers


def play_abreast(engine: BatchEngine, jobs: Sequence[Job], rng: random.Random) -> dict[str, list[int]]:
    """Run the jobs with prefill from one position on: in chunks of one length, and then to their ends."""
    done, going = 0, [job for job in jobs if len(job.prompt) > 1]
    while going:
        width = min(rng.randint(1, 45), *(len(job.prompt) - 1 - done for job in going))
        engine.prefill({job.name: job.prompt[done : done + width] for job in going})
        done += width
        going = [job for job in going if len(job.prompt) - 1 > done]
        if len(going) == 3:
            engine.prefill({job.name: job.prompt[done:-1] for job in going})
            break
    return play(engine, jobs, rng, prefilled={job.name: len(job.prompt) - 1 for job in jobs})


def draw_jobs(rng: random.Random, draws: Iterable[SamplingParams] = (GREEDY,)) -> list[Job]:
    """Return jobs with prompts of one token, around the window and far beyond, and short and long answers."""
    lengths = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, *(rng.randint(3, 100) for _ in range(3))]
    rng.shuffle(lengths)
    settings = list(draws)
    return [
        Job(
            name=f"row {index}",
            prompt=tuple(rng.randrange(2000) for _ in range(length)),
            tokens=rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 45)]),
            sampling=settings[index % len(settings)],
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_rows_whose_prompts_were_run_side_by_side_say_what_they_say_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, calls = random.Random(3), []

    def recorded(*given: Any) -> Any:
        calls.append(given)
        return prefill_abreast(*given)

    monkeypatch.setattr(prefill_module, "prefill_abreast", recorded)
    jobs = draw_jobs(rng)[:6]
    answers = play_abreast(engine_of(name), jobs, rng)
    assert calls
    for job in jobs:
        assert answers[job.name] == alone(name, job), (len(job.prompt), job.tokens)


def test_a_reset_engine_serves_on() -> None:
    engine = engine_of("sliding")
    engine.prefill({"prefilling": [1, 2, 3]})
    for row in ("a", "b"):
        engine.start(row, [4], 1, SamplingParams())
    engine.step()
    engine.start("joining", [4], 1, SamplingParams())
    assert engine.cache_bytes() > 0
    engine.reset()
    assert engine.cache_bytes() == 0
    assert engine.step().tokens == {}
    job = Job("a", (3, 4, 5), 5)
    assert play(engine, [job], random.Random(0))["a"] == alone("sliding", job)


class Rewrapped(nn.Module):
    """The dense model with other caches around or in place of its own."""

    def __init__(self, make: Any, unwrap: Any = lambda cache: cache) -> None:
        super().__init__()
        self._make, self._unwrap = make, unwrap

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return network("dense")(tokens, cache=[self._unwrap(layer) for layer in cache])

    def make_cache(self) -> list[Any]:
        return [self._make() for _ in network("dense").layers]


class CountingCache(KVCache):
    """A cache with a lazy count that no output needs, like offsets in layers without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = mx.array(0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.count = self.count + keys.shape[2]
        return super().update_and_fetch(keys, values)

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.count

    @state.setter
    def state(self, state: Any) -> None:
        self.keys, self.values, self.count = state


def test_lazy_graph_does_not_grow_over_steps() -> None:
    made: list[CountingCache] = []

    def make() -> CountingCache:
        made.append(CountingCache())
        return made[-1]

    alone = BatchCapabilities(False, False, True, True, False, False, False, False)
    engine = BatchEngine(Rewrapped(make), alone)
    engine.start("row", [3], 1, SamplingParams())
    for _ in range(50):
        engine.step()
    graph = io.StringIO()
    used = next(cache for cache in made if cache.offset == 50)
    mx.export_to_dot(graph, used.count)
    assert graph.getvalue().count("->") < 10
    assert used.count.item() == 50
