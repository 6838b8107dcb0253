"""A Qwen3.5 that sees brings layers for multi-token prediction as one that only reads does."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.models.fixtures import model_folder
from tests.models.heads import make_unfitted_heads
from tests.worker.sights import jobs_of, play
from worker.contract import Model
from worker.drafts import LATE_MAX
from worker.engine.heads import Heads
from worker.models.load import ModelLoader

EYES = "qwen3_5-eyes"


def test_layers_of_a_model_that_sees_guess_for_rows_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(EYES), folder)
    make_unfitted_heads(folder)
    model = ModelLoader(str(folder), uses_heads=True).load(lambda done, total: None)
    assert isinstance(model, Model)
    assert model.facts.capabilities.images
    heads = model.engine.drafter
    assert isinstance(heads, Heads)
    jobs, guessed = jobs_of(EYES, 1), set[str]()
    by_name = {job.name: job for job in jobs}

    def draft(name: str, answered: Sequence[int]) -> Sequence[int]:
        job, news = by_name[name], (*by_name[name].prompt, *answered)[heads.length(name) :]
        if job.question.images or not heads.knows(name) or not news:
            return ()
        if len(news) > LATE_MAX:
            heads.read(name, news[:-1])
            news = news[-1:]
        guesses = heads.draft({name: news}, 2).get(name, ())
        guessed.update({name} if guesses else ())
        return guesses

    answers = play(model.engine, jobs, random.Random(1), draft)
    assert answers == {job.name: job.expected(EYES) for job in jobs}
    assert guessed == {job.name for job in jobs if not job.question.images}
