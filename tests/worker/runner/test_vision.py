"""Rows with and without images in one batch: tokens equal upstream's however rows come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.models.vision_models import EYES
from tests.worker.vision_models import TOKENS_MAX, Embeddings, Job, jobs_of, loaded, open_row, play
from worker.interfaces import Engine
from worker.values import CacheSegment, SamplingParams

FAMILIES = tuple(name for name in EYES if name != "smolvlm-eyes")
"""SmolVLM's network is Idefics 3's, and that of the pocket model Qwen3.5's."""

OF_EACH_KIND = ("qwen3_5-eyes", "qwen3_vl-eyes", "gemma3-eyes", "gemma4-eyes")
"""Positions in three axes with states and without, and images that see all of themselves."""


@pytest.mark.parametrize("model", FAMILIES)
def test_rows_with_and_without_images_say_what_upstream_says_alone(model: str) -> None:
    jobs = jobs_of(model, 1)
    engine = loaded(model).engine
    answers = play(engine, jobs, random.Random(1))
    for job in jobs:
        assert answers[job.name] == job.expected(model), len(job.question.images)
    assert engine.cache_bytes() == 0


@pytest.mark.parametrize("model", ["qwen3_5-eyes", "gemma3-eyes"])
def test_drafts_for_rows_with_images_change_nothing(model: str) -> None:
    """Tests correct drafts, wrong ones, and some with a correct prefix."""
    jobs, engine, dice = jobs_of(model, 1), loaded(model).engine, random.Random(2)
    expected = {job.name: job.expected(model) for job in jobs}
    with_images = {job.name for job in jobs if job.question.images}
    steps, drafted = [0], set()

    def draft(job: str, answered: Sequence[int]) -> list[int]:
        steps[0] += job in with_images and len(answered) < len(expected[job])
        tokens = expected[job][len(answered) :][: dice.randint(0, 4)]
        if tokens and dice.random() < 0.3:
            tokens[dice.randrange(len(tokens))] = dice.randrange(100)
        drafted.update({job} if tokens else ())
        return tokens

    assert play(engine, jobs, random.Random(1), draft) == expected
    assert with_images
    assert with_images <= drafted
    assert steps[0] < 0.8 * sum(len(expected[job]) for job in with_images)


def finish(
    engine: Engine, job: Job, embeddings: Embeddings, done: int, answered: Sequence[int] = ()
) -> list[int]:
    """Finish a row's prefill and decode its answer; return all its answer tokens."""
    whole = (*job.prompt, *answered)
    if done < len(whole) - 1:
        engine.prefill({job.name: whole[done:-1]}, embeddings=embeddings)
    engine.start(job.name, whole, len(job.prompt), SamplingParams())
    tokens = list(answered)
    while len(tokens) < job.tokens:
        tokens += engine.step().tokens.values()
    engine.drop(job.name)
    return tokens


def with_images(model: str) -> Job:
    """Return a job with several images and a long answer."""
    job = max(jobs_of(model, 1), key=lambda job: len(job.request.images))
    return Job(job.question, job.request, TOKENS_MAX)


@pytest.mark.parametrize("model", OF_EACH_KIND)
def test_a_row_with_images_is_forked_resumed_and_restored(model: str) -> None:
    """Forks and restores within an image and after it. Restored images are not encoded again."""
    engine, job = loaded(model).engine, with_images(model)
    first, second = job.request.images[:2]
    cut = second.first + 1
    embeddings = open_row(engine, job)
    engine.prefill({job.name: job.prompt[:cut]}, embeddings=embeddings)
    engine.fork(job.name, "copy")
    engine.prefill({job.name: job.prompt[cut : second.end]}, embeddings=embeddings)
    copy = Job(job.question, replace(job.request, id="copy"), job.tokens)
    assert finish(engine, copy, embeddings, cut) == job.expected(model)
    assert finish(engine, job, embeddings, second.end) == job.expected(model)

    open_row(engine, job)
    engine.set_images(job.name, (*job.prompt, *job.expected(model)[:5]), job.request.images)
    assert finish(engine, job, embeddings, 0, job.expected(model)[:5]) == job.expected(model)

    assert engine.shape is not None
    for place in (first.first + 1, second.end):
        open_row(engine, job)
        engine.prefill({job.name: job.prompt[:place]}, embeddings=embeddings)
        (columns,), states = engine.copy_cache(job.name, [(0, place)], states=engine.shape.has_states)
        engine.drop(job.name)
        needed = {image.digest for image in job.request.images if image.end > place}
        engine.set_images(job.name, job.prompt, job.request.images)
        pieces = [CacheSegment(columns.payload, 0, place, place)]
        engine.restore(job.name, pieces, None if states is None else states.payload)
        left = {digest: each for digest, each in embeddings.items() if digest in needed}
        assert finish(engine, job, left, place) == job.expected(model)


@pytest.mark.parametrize("model", ["qwen3_5-eyes"])
def test_an_answer_may_name_an_image(model: str) -> None:
    """A sampled image placeholder token is treated as an ordinary token."""
    engine, job = loaded(model).engine, with_images(model)
    token = max(job.request.images[0].tokens, key=job.request.images[0].tokens.count)
    embeddings = open_row(engine, job)
    engine.set_images(job.name, (*job.prompt, token, token, token), job.request.images)
    engine.prefill({job.name: (*job.prompt, token, token)}, embeddings=embeddings)
    engine.start(job.name, (*job.prompt, token, token, token), len(job.prompt), SamplingParams())
    again: list[int] = []
    while not again:
        again += engine.step().tokens.values()
    engine.drop(job.name)
    open_row(engine, job)
    engine.prefill({job.name: job.prompt[:-1]}, embeddings=embeddings)
    bias = SamplingParams(forced=(token, token, token))
    engine.start(job.name, job.prompt, len(job.prompt), bias)
    drawn: list[int] = []
    while len(drawn) < 4:
        drawn += engine.step().tokens.values()
    engine.drop(job.name)
    assert drawn == [token] * 3 + again[:1]
