"""Text generation by mlx-vlm's networks: which ones support it, and how each gets its input."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.models.fixtures import model_folder
from tests.worker.folders import failure, nothing
from worker.interfaces import Model, ModelError
from worker.load import capabilities
from worker.load.load import ModelLoader
from worker.load.vlm_text import like, load_network, require_writer, try_text
from worker.runner.kv.capability_probe import ProbeTarget, probe_capabilities
from worker.runner.vision import VisionNetwork

TEXT = "family-qwen3_5_text"

# Transformers warns about these families' configs, which cannot be changed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def tried(family: str) -> VisionNetwork:
    network = load_network(model_folder(f"family-{family}"))
    try_text(network)
    return network


@pytest.mark.parametrize("name", [TEXT, "family-cohere_compass"])  # which sees, but has no processor
def test_a_model_that_mlx_vlm_alone_has_is_served_for_text(name: str) -> None:
    model = ModelLoader(str(model_folder(name))).load(nothing)
    assert isinstance(model, Model)
    assert model.info.batched
    assert not model.info.capabilities.images


def test_code_that_comes_with_weights_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "a-model"
    shutil.copytree(model_folder("gemma3-eyes"), folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    with pytest.raises(ModelError):
        ModelLoader(str(folder)).load(nothing)
    with pytest.raises(ModelError, match="code of its own"):
        load_network(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", ["flux2", "qwen3_embedding"])
def test_families_that_write_no_text_are_known_before_weights_are_read(family: str) -> None:
    with pytest.raises(ModelError, match=f"architecture '{family}' for a task other"):
        require_writer({"model_type": family})


def test_a_text_that_is_read_otherwise_in_parts_is_refused() -> None:
    for family in ("family-paligemma",):
        assert "logits change when a text is run in chunks" in failure(model_folder(family))


def test_answers_that_depend_on_where_a_prompt_is_cut_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    uncut = replace(probe_capabilities(ProbeTarget(load_network(model_folder(TEXT)))), cut=False)
    monkeypatch.setattr(capabilities, "look_up", lambda network: uncut)
    assert "depend on where a prompt is cut" in failure(model_folder(TEXT))


def test_positions_are_told_as_each_wants_them_also_to_a_reopened_network() -> None:
    assert tried("glm4v").axes == 3
    assert tried("hunyuan_vl").axes == 0
    network = tried("cohere_compass")
    assert network.axes == like(network)(model_folder("family-cohere_compass")).axes == 1


def test_positions_that_upstream_keeps_of_one_prompt_are_not_those_of_the_next() -> None:
    network = tried("hunyuan_vl")

    def read(tokens: list[int]) -> Any:
        return network(mx.array([tokens]), cache=network.make_cache())[0, -1]

    first = read([5, 6, 7])
    read([9, 8, 7, 6, 5, 4, 3])
    assert mx.array_equal(read([5, 6, 7]), first)
