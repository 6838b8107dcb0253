"""A Qwen3.5 vision model has MTP layers like a text-only one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.models.fixtures import model_folder
from tests.models.mtp_models import make_unfitted_heads
from tests.worker.vision_models import jobs_of, play
from worker.interfaces import Model
from worker.load.load import ModelLoader
from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer
from worker.values import BACKLOG_MAX

EYES = "qwen3_5-eyes"


def test_layers_of_a_model_that_sees_guess_for_rows_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(EYES), folder)
    make_unfitted_heads(folder)
    model = ModelLoader(str(folder), use_mtp=True).load(lambda done, total: None)
    assert isinstance(model, Model)
    assert model.info.capabilities.images
    heads = model.engine.drafter
    assert isinstance(heads, HiddenStateProposer)
    jobs, guessed = jobs_of(EYES, 1), set[str]()
    by_name = {job.name: job for job in jobs}

    def draft(name: str, answered: Sequence[int]) -> Sequence[int]:
        job, new_tokens = by_name[name], (*by_name[name].prompt, *answered)[heads.length(name) :]
        if job.question.images or not heads.knows(name) or not new_tokens:
            return ()
        if len(new_tokens) > BACKLOG_MAX:
            heads.read(name, new_tokens[:-1])
            new_tokens = new_tokens[-1:]
        guesses = heads.draft({name: new_tokens}, 2).get(name, ())
        guessed.update({name} if guesses else ())
        return guesses

    answers = play(model.engine, jobs, random.Random(1), draft)
    assert answers == {job.name: job.expected(EYES) for job in jobs}
    assert guessed == {job.name for job in jobs if not job.question.images}
