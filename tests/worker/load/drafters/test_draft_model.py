"""A draft model is loaded with its target if it can draft for it; otherwise a sentence gives the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.fixtures import model_folder
from tests.worker.folders import copied, failure, nothing
from worker.interfaces import Model
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
from worker.load.source import bytes_of, weight_files
from worker.runner.drafters.draft_model import DraftModelProposer


def test_it_is_loaded_beside_its_model_and_shares_its_memory_and_rows() -> None:
    alone = ModelLoader(str(model_folder("dense")), LoadOptions(memory_limit_bytes=2**30)).load(nothing)
    folder = model_folder("sliding")
    both = ModelLoader(
        str(model_folder("dense")), LoadOptions(memory_limit_bytes=2**30, draft_model=str(folder))
    )
    model = both.load(nothing)
    assert isinstance(model, Model)
    assert isinstance(alone, Model)
    drafter = model.engine.drafter
    assert isinstance(drafter, DraftModelProposer)
    assert 0 < drafter.relative_cost < 100
    weights = bytes_of(weight_files(folder, "draft"))
    assert (alone.info.cache_bytes_max or 0) - (model.info.cache_bytes_max or 0) == weights
    assert model.engine.row_bytes(100) == alone.engine.row_bytes(100) + drafter.row_bytes(100)
    assert model.info.fingerprint == alone.info.fingerprint
    engine = model.engine
    for row in ("a", "b"):
        drafter.read(row, [1, 2, 3])
    engine.drop("a")
    assert (drafter.length("a"), drafter.length("b")) == (0, 3)
    assert engine.cache_bytes() > 0
    engine.reset()
    assert drafter.length("b") == engine.cache_bytes() == 0


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "has another tokenizer" in failure(model_folder("dense"), draft_model=str(model_folder("hybrid")))
    folder = copied(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][-1]["content"] += "!"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    told = failure(model_folder("dense"), draft_model=str(folder))
    assert "has another tokenizer" in told


@pytest.mark.parametrize(
    ("model", "draft", "words"),
    [
        ("dense", "no/where/at/all", "no such folder"),
        ("dense", "bert-embedder", "cannot draft"),
        ("dense", "jamba", "cannot draft for several requests"),
        ("jamba", "dense", "no drafts can be tried on it"),
        ("bert-embedder", "dense", "leave --draft-model out"),
    ],
)
def test_unusable_draft_model_is_refused(model: str, draft: str, words: str) -> None:
    folder = Path(draft) if "/" in draft else model_folder(draft)
    assert words in failure(model_folder(model), draft_model=str(folder))


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
        {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}},
        {"architectures": ["DSparkDraftModel"], "model_type": "qwen3"},
        {"model_type": "gemma4_assistant"},
        {"model_type": "glm_moe_dsa_mtp"},
    ],
)
def test_a_drafter_that_reads_inner_layers_is_refused_by_its_kind(
    tmp_path: Path, config: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = next(iter(config["architectures"])) if "architectures" in config else config["model_type"]
    told = failure(model_folder("dense"), draft_model=str(tmp_path))
    assert f"drafters of this kind ({kind}) are not run" in told
    assert "a small language model with the same tokenizer" in told
