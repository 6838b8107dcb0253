"""MTP layers of a vision model, and those in a folder of their own."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import mlx.core as mx
import pytest

from tests.models.fixtures import model_folder
from tests.models.mtp_models import HEADS, make_unfitted_heads
from tests.worker.folders import failure, nothing
from tests.worker.vision_models import jobs_of, play
from worker.interfaces import Model
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
from worker.load.source import bytes_of, weight_files
from worker.runner.drafters.mtp import HiddenStateProposer
from worker.runner.runner import BatchEngine
from worker.values import BACKLOG_MAX, SamplingParams

EYES = "qwen3_5-eyes"


def test_layers_of_a_model_that_sees_guess_for_rows_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(EYES), folder)
    make_unfitted_heads(folder)
    model = ModelLoader(str(folder)).load(nothing)
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


def separate(folder: Path) -> Path:
    """Write the MTP layers of the tiny model into a folder of their own."""
    source = json.loads((model_folder(HEADS) / "config.json").read_text())
    config = {"model_type": "qwen3_5_mtp", "text_config": source["text_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(model_folder(HEADS) / "model.safetensors"))
    own = {name.removeprefix("mtp."): each for name, each in weights.items() if name.startswith("mtp.")}
    mx.save_safetensors(str(folder / "model.safetensors"), own, metadata={"format": "mlx"})
    return folder


def test_layers_may_have_a_folder_of_their_own_and_share_the_memory(tmp_path: Path) -> None:
    folder = separate(tmp_path)
    alone = ModelLoader(str(model_folder("hybrid")), LoadOptions(memory_limit_bytes=2**30)).load(nothing)
    loader = ModelLoader(
        str(model_folder("hybrid")), LoadOptions(draft_model=str(folder), memory_limit_bytes=2**30)
    )
    model = loader.load(nothing)
    assert isinstance(alone, Model)
    assert isinstance(model, Model)
    drafter = model.engine.drafter
    assert isinstance(drafter, HiddenStateProposer)
    assert drafter.relative_cost > 0
    assert drafter.row_bytes(1000) > drafter.row_bytes(10) > 0
    weights = bytes_of(weight_files(folder, "draft"))
    assert (alone.info.cache_bytes_max or 0) - (model.info.cache_bytes_max or 0) == weights
    assert model.info.fingerprint == alone.info.fingerprint


def test_layers_of_another_width_are_refused(tmp_path: Path) -> None:
    path = separate(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["hidden_size"] *= 2
    path.write_text(json.dumps(config))
    assert "do not fit the model" in failure(model_folder("hybrid"), draft_model=str(tmp_path))


def test_a_model_whose_layers_do_not_load_is_served_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(HEADS), folder)
    weights = mx.load(str(folder / "model.safetensors"))
    cut = {name: each[:1] if name == "mtp.fc.weight" else each for name, each in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), cut, metadata={"format": "mlx"})
    model = ModelLoader(str(folder)).load(nothing)
    assert isinstance(model, Model)
    assert model.engine.drafter is None
    assert "its multi-token prediction layers are not used" in caplog.text


@pytest.mark.parametrize(("name", "speculation"), [("hybrid", None), (HEADS, "off")])
def test_nothing_drafts_without_layers_or_when_it_is_off(
    name: str, speculation: Literal["auto", "off"] | None
) -> None:
    model = ModelLoader(str(model_folder(name)), LoadOptions(speculation=speculation)).load(nothing)
    assert isinstance(model, Model)
    assert model.engine.drafter is None
    assert model.position_cost is None


def test_an_engine_that_verifies_no_drafts_keeps_no_hidden_states() -> None:
    model = ModelLoader(str(model_folder(HEADS))).load(nothing)
    assert isinstance(model, Model)
    engine = model.engine
    assert isinstance(engine, BatchEngine)
    drafter = engine.drafter
    assert isinstance(drafter, HiddenStateProposer)
    engine.limit_passes(1, 0)
    assert engine.drafter is None
    engine.prefill({"a": (1, 2, 3)})
    engine.start("a", (1, 2, 3, 4), 4, SamplingParams())
    engine.step()
    assert not drafter.knows("a")
