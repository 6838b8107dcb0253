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
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from tests.models.fixtures import model_folder
from tests.worker import probed_networks
from worker.contract.engine import SamplingParams
from worker.engine import engine as engine_module
from worker.engine.caches.batch import prefill_abreast
from worker.engine.engine import BatchEngine

MODELS = ("dense", "hybrid", "sliding")
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
def network(name: str) -> nn.Module:
    return load_model(model_folder(name))[0]


def engine_of(name: str) -> BatchEngine:
    return probed_networks.engine(network, name)


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
            if done == len(job.prompt) - 1:
                engine.start(name, job.prompt, len(job.prompt), job.sampling)
                answers[name] = []
                del prefilled[name]
            else:
                chunk = job.prompt[done : min(done + rng.randint(1, 45), len(job.prompt) - 1)]
                engine.prefill({name: chunk})
                prefilled[name] += len(chunk)
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
    lengths = [1, 1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, *(rng.randint(3, 100) for _ in range(6))]
    rng.shuffle(lengths)
    settings = list(draws)
    return [
        Job(
            name=f"row {index}",
            prompt=tuple(rng.randrange(2000) for _ in range(length)),
            tokens=rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 60)]),
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

    monkeypatch.setattr(engine_module, "prefill_abreast", recorded)
    jobs = draw_jobs(rng)[:6]
    answers = play_abreast(engine_of(name), jobs, rng)
    assert calls
    for job in jobs:
        assert answers[job.name] == alone(name, job), (len(job.prompt), job.tokens)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_rows_say_what_upstream_says_alone(name: str, seed: int) -> None:
    rng = random.Random(seed)
    jobs = draw_jobs(rng)
    engine = engine_of(name)
    assert engine.is_batchable
    answers = play(engine, jobs, rng)
    for job in jobs:
        assert answers[job.name] == alone(name, job), (len(job.prompt), job.tokens)
    assert engine.cache_bytes() == 0


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_start_together_decode_past_the_window_together(name: str) -> None:
    rng = random.Random(7)
    jobs = [Job(f"{n}", tuple(rng.randrange(2000) for _ in range(n)), 80) for n in (1, 20, 33, 70)]
    engine = engine_of(name)
    for job in jobs:
        if job.prompt[:-1]:
            engine.prefill({job.name: job.prompt[:-1]})
        engine.start(job.name, job.prompt, len(job.prompt), SamplingParams())
    steps = [engine.step().tokens for _ in range(81)][1:]
    for job in jobs:
        assert [step[job.name] for step in steps] == alone(name, job)


@pytest.mark.parametrize("name", MODELS)
def test_sampled_rows_say_the_same_alone_and_in_a_batch(name: str) -> None:
    rng = random.Random(5)
    draws = [
        SamplingParams(seed=1, temperature=1.0),
        SamplingParams(seed=2**62 + 5, temperature=0.8, top_p=0.9),
        SamplingParams(),
        SamplingParams(seed=3, temperature=1.5, top_k=40, min_p=0.02),
    ]
    jobs = draw_jobs(rng, draws)
    engine = engine_of(name)
    together = play(engine, jobs, rng)
    for job in jobs:
        assert play(engine, [job], rng) == {job.name: together[job.name]}
    greedy = [job for job in jobs if job.sampling == SamplingParams()]
    assert all(together[job.name] == alone(name, job) for job in greedy)


def test_a_sampled_row_resumed_after_some_tokens_goes_on_the_same() -> None:
    sampling = SamplingParams(seed=9, temperature=1.0, top_p=0.95)
    job = Job("whole", (5, 6, 7, 8), 30, sampling)
    whole = play(engine_of("hybrid"), [job], random.Random(0))["whole"]
    engine = engine_of("hybrid")
    tokens = (*job.prompt, *whole[:13])
    engine.prefill({"rest": tokens[:-1]})
    engine.start("rest", tokens, len(job.prompt), sampling)
    assert [engine.step().tokens for _ in range(18)][1:] == [{"rest": token} for token in whole[13:]]


def test_a_row_can_be_dropped_wherever_it_stands() -> None:
    engine = engine_of("hybrid")
    stays = Job("stays", (9, 8, 7), 12)
    engine.drop("nobody")
    engine.prefill({"prefilling": [1, 2, 3]})
    engine.drop("prefilling")
    engine.prefill({"stays": stays.prompt[:-1]})
    engine.start("stays", stays.prompt, 3, SamplingParams())
    assert engine.step().tokens == {}
    answers = [engine.step().tokens["stays"] for _ in range(2)]
    for round_ in range(3):
        engine.start("joins", [4], 1, SamplingParams())
        engine.start("never", [5], 1, SamplingParams())
        engine.drop("never")
        first = engine.step().tokens
        assert first.keys() == {"stays"}
        answers.append(first["stays"])
        both = engine.step().tokens
        assert both.keys() == {"stays", "joins"}
        answers.append(both["stays"])
        engine.drop("joins")
        engine.drop("joins")
        if round_ == 1:  # reuses the name before the batch has closed its slot
            engine.start("joins", [6], 1, SamplingParams())
            engine.drop("joins")
        answers.append(engine.step().tokens["stays"])
    assert answers == alone("hybrid", stays)[: len(answers)]
    engine.drop("stays")
    assert engine.cache_bytes() == 0
    assert engine.step().tokens == {}


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


def test_caches_in_a_list_are_batched_by_what_they_can_do() -> None:
    nested = Rewrapped(lambda: CacheList(KVCache(), KVCache()), lambda cache: cache[0])
    rng = random.Random(3)
    jobs = draw_jobs(rng)[:6]
    engine = BatchEngine(nested)
    assert engine.is_batchable
    answers = play(engine, jobs, rng)
    assert all(answers[job.name] == alone("dense", job) for job in jobs)


@pytest.mark.parametrize(
    ("make", "batched"),
    [
        (lambda: QuantizedKVCache(group_size=32, bits=8), True),
        (lambda: ChunkedKVCache(chunk_size=4096), False),  # stores its start position as one number
    ],
)
def test_rows_whose_caches_upstream_cannot_merge(make: Any, batched: bool) -> None:
    network = Rewrapped(make)
    engine = BatchEngine(network)
    assert engine.is_batchable == batched
    rng = random.Random(4)
    jobs = draw_jobs(rng)
    answers = play(engine, jobs, rng)
    for job in jobs:
        assert answers[job.name] == loop_alone(network, job)


def loop_alone(network: nn.Module, job: Job) -> list[int]:
    """Generate greedily with a minimal loop."""
    caches, said, tokens = make_prompt_cache(network), [], mx.array([job.prompt])
    for _ in range(job.tokens):
        tokens = mx.argmax(network(tokens, caches)[:, -1:], axis=-1)
        said.append(int(np.array(tokens).item()))
    return said


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

    engine = BatchEngine(Rewrapped(make))
    engine.start("row", [3], 1, SamplingParams())
    for _ in range(50):
        engine.step()
    graph = io.StringIO()
    used = next(cache for cache in made if cache.offset == 50)
    mx.export_to_dot(graph, used.count)
    assert graph.getvalue().count("->") < 10
    assert used.count.item() == 50
