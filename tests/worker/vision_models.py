"""Vision models as the worker loads them, and requests with images as the gateway sends them.

    python -m tests.worker.vision_models --first-seed 0 --seeds 50

Runs rows with and without images on every family, which join, leave and are chunked at random, and compares
their answers with upstream alone.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from protocol.messages import Generate
from protocol.types import Media, Sampling
from tests import factories
from tests.models.vision_models import EYES
from tests.worker.image_questions import POCKET, Question, answer, draw_question, folder_of
from worker.interfaces import Engine, Model, Preparer
from worker.load.load import ModelLoader
from worker.values import EncodedImage, EngineRequest, SamplingParams

NAMES = (*EYES, POCKET)
CONTEXT_TOKENS = 4096
IMAGES = (0, 1, 3, 0, 1, 2)
TOKENS_MAX = 12


@cache
def loaded(name: str) -> Model:
    model = ModelLoader(str(folder_of(name))).load(lambda done, total: None)
    assert isinstance(model, Model)
    return model


@cache
def preparer(name: str) -> Preparer:
    return loaded(name).open_preparer(CONTEXT_TOKENS)


def request(id: str, question: Question, **fields: Any) -> Generate:
    """Return the message that the gateway sends for a question."""
    media = [
        Media(frame=index, mime="image/png", sha256=hashlib.sha256(data).hexdigest(), param=f"image {index}")
        for index, data in enumerate(question.images)
    ]
    sampling = Sampling(seed=0)
    given = {"messages": [*question.messages], "media": media, "sampling": sampling}
    return factories.request(id, **given | fields)


def engine_request(name: str, id: str, question: Question, **fields: Any) -> EngineRequest:
    return preparer(name).prepare(request(id, question, **fields), question.images)


@dataclass(frozen=True)
class Job:
    question: Question
    request: EngineRequest
    tokens: int

    @property
    def name(self) -> str:
        return self.request.id

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.tokens

    def expected(self, model: str) -> list[int]:
        return alone(model, self.question)[: self.tokens]


@cache
def alone(model: str, question: Question) -> list[int]:
    return answer(model, question, TOKENS_MAX)


@cache
def jobs_of(model: str, seed: int) -> tuple[Job, ...]:
    rng = random.Random(seed)
    questions = [draw_question(rng, images) for images in IMAGES]
    return tuple(
        Job(question, engine_request(model, f"row {index}", question), rng.randint(1, TOKENS_MAX))
        for index, question in enumerate(questions)
    )


def open_row(engine: Engine, job: Job) -> Embeddings:
    """Open a row as the scheduler does: encode each image once, and set the images before any prefill."""
    if job.request.images:
        engine.set_images(job.name, job.prompt, job.request.images)
    return {image.digest: engine.encode_image(image) for image in job.request.images}


Embeddings = Mapping[str, EncodedImage]

Draft = Callable[[str, Sequence[int]], Sequence[int]]
"""Returns draft tokens for a job after its answer so far."""


def play(
    engine: Engine, jobs: Sequence[Job], rng: random.Random, draft: Draft = lambda job, answered: ()
) -> dict[str, list[int]]:
    """Run the jobs: they join at random steps, prefill in random chunks and leave when done."""
    waiting, prefilled = list(jobs), dict[str, int]()
    by_name = {job.name: job for job in waiting}
    answers: dict[str, list[int]] = {}
    embeddings: dict[str, Embeddings] = {}
    while waiting or prefilled or any(len(answers[name]) < by_name[name].tokens for name in answers):
        if waiting and rng.random() < 0.4:
            job = waiting.pop(0)
            embeddings[job.name] = open_row(engine, job)
            prefilled[job.name] = 0
        for name in list(prefilled):
            job, done = by_name[name], prefilled[name]
            if done == len(job.prompt) - 1:
                engine.start(name, job.prompt, len(job.prompt), SamplingParams())
                answers[name] = []
                del prefilled[name]
            else:
                chunk = job.prompt[done : min(done + rng.randint(1, 40), len(job.prompt) - 1)]
                engine.prefill({name: chunk}, embeddings=embeddings[name])
                prefilled[name] += len(chunk)
        step = engine.step({name: draft(name, said) for name, said in answers.items()})
        for name, token in step.tokens.items():
            answers[name] += [token, *(drawn.token for drawn in step.further.get(name, ()))]
            if len(answers[name]) >= by_name[name].tokens:
                del answers[name][by_name[name].tokens :]
                engine.drop(name)
    return answers


def wrong(model: str, seed: int) -> list[str]:
    """Return the rows whose answers differ from upstream's alone."""
    jobs = jobs_of(model, seed)
    answers = play(loaded(model).engine, jobs, random.Random(seed))
    return [job.name for job in jobs if answers[job.name] != job.expected(model)]


def main() -> int:
    """Return 1 if a row was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    asked = parser.parse_args()
    failed = 0
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        for model in NAMES:
            if rows := wrong(model, seed):
                failed += 1
                print(f"seed {seed}: {model}: {', '.join(rows)}", flush=True)
    print(f"{asked.seeds} seeds, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
