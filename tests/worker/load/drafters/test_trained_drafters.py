"""A trained drafter loads with its own target model and is refused with any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.models.fixtures import model_folder
from tests.models.mtp_models import HEADS
from tests.worker.folders import copied, failure, nothing
from worker.interfaces import Model
from worker.load.load import ModelLoader
from worker.load.source import bytes_of, weight_files
from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer


def loaded(model: str, draft: str | Path) -> Model:
    loader = ModelLoader(str(model_folder(model)), draft_model=str(draft), memory_limit_bytes=2**30)
    model_ = loader.load(nothing)
    assert isinstance(model_, Model)
    return model_


@pytest.mark.parametrize("name", ["dense_eagle3", "dense_dflash"])
def test_it_is_loaded_beside_its_model_and_shares_its_memory(name: str) -> None:
    alone = ModelLoader(str(model_folder("dense")), memory_limit_bytes=2**30).load(nothing)
    model = loaded("dense", model_folder(name))
    assert isinstance(alone, Model)
    drafter = model.engine.drafter
    assert isinstance(drafter, HiddenStateProposer)
    assert drafter.block == (7 if "dflash" in name else 1)
    assert drafter.relative_cost > 0
    assert drafter.row_bytes(1000) > drafter.row_bytes(10) > 0
    weights = bytes_of(weight_files(model_folder(name), "draft"))
    assert (alone.info.cache_bytes_max or 0) - (model.info.cache_bytes_max or 0) == weights
    assert model.info.fingerprint == alone.info.fingerprint


def test_layers_for_multi_token_prediction_may_have_a_folder_of_their_own(tmp_path: Path) -> None:
    source = json.loads((model_folder(HEADS) / "config.json").read_text())
    config = {"model_type": "qwen3_5_mtp", "text_config": source["text_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(model_folder(HEADS) / "model.safetensors"))
    own = {name.removeprefix("mtp."): each for name, each in weights.items() if name.startswith("mtp.")}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), own, metadata={"format": "mlx"})
    assert isinstance(loaded("hybrid", tmp_path).engine.drafter, HiddenStateProposer)


def changed(tmp_path: Path, name: str, within: str | None = None, **changes: Any) -> Path:
    """Copy a drafter with changes to its config, or to the part of it named `within`."""
    if within is None:
        return copied(tmp_path, name, **changes)
    config = json.loads((model_folder(name) / "config.json").read_text())
    return copied(tmp_path, name, **{within: config[within] | changes})


@pytest.mark.parametrize(
    ("name", "within", "changes", "words"),
    [
        ("dense_eagle3", None, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "reads 2 layers"),
        ("dense_dflash", None, {"num_target_layers": 36}, "for a model of 36 layers, this one has 2"),
        ("dense_dflash", None, {"vocab_size": 32000}, "has 32000 tokens, its target 2048"),
        ("dense_dflash", None, {"model_file": "theirs.py"}, "which is never done"),
        ("dense_eagle3", None, {"speculators_model_type": "eagle9"}, "mlx-vlm cannot load the draft model"),
    ],
)
def test_drafter_that_does_not_fit_its_target_model_is_refused(
    tmp_path: Path, name: str, within: str | None, changes: dict[str, Any], words: str
) -> None:
    folder = changed(tmp_path, name, within, **changes)
    assert words in failure(model_folder("dense"), draft_model=str(folder))


def test_weights_that_do_not_fit_the_target_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "dense_eagle3")
    weights = dict(mx.load(str(folder / "model.safetensors")))
    beyond = weights | {"d2t": weights["d2t"] + 2000}
    mx.save_safetensors(str(folder / "model.safetensors"), beyond, metadata={"format": "mlx"})
    assert "leads beyond the tokens of its target" in failure(model_folder("dense"), draft_model=str(folder))
    folder = changed(tmp_path / "wide", "dense_eagle3", target_hidden_size=96)
    wide = weights | {"fc.weight": mx.zeros((64, 3 * 96))}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, metadata={"format": "mlx"})
    assert "of size 96, its target's have 64" in failure(model_folder("dense"), draft_model=str(folder))
