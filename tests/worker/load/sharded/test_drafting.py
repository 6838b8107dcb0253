"""Drafting in a sharded model: on the first rank alone, from hidden states that all ranks compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from tests.models.drafters import DRAFTERS
from tests.models.fixtures import model_folder
from tests.models.mtp_models import HEADS
from tests.worker.folders import nothing
from worker.interfaces import ModelError
from worker.load.sharded.drafting import ShardDrafting
from worker.load.sharded.loader import ShardLoader
from worker.load.sharded.parallelism import ShardGroup, ShardNetwork
from worker.runner.drafters.draft_model import DraftModelProposer
from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer


def drafts(*, is_leader: bool = True, use_mtp: bool = True, draft_model: str | None = None) -> ShardDrafting:
    options = {"draft_model": draft_model, "use_mtp": use_mtp, "is_leader": is_leader}
    return ShardDrafting("m", **options, probe_cache_folder=None)


def looked(made: ShardDrafting, name: str = HEADS) -> ShardNetwork:
    """Return a shard that is the whole model, after `made` has inspected it."""
    network: Any = load_model(model_folder(name), lazy=True)[0]
    made.inspect_folder(model_folder(name), network)
    return ShardNetwork(network)


def is_listening(part: ShardNetwork) -> bool:
    return part._tap is not None


@pytest.mark.parametrize("is_leader", [True, False])
def test_all_compute_what_the_first_one_guesses_by(is_leader: bool) -> None:
    made = drafts(is_leader=is_leader)
    part = looked(made)
    found = made.drafter(ShardGroup("ring", None), part, can_verify=True)
    assert isinstance(found, HiddenStateProposer) == is_leader
    assert is_listening(part)
    part(mx.array([[1, 2, 3, 4]], mx.uint32), cache=part.make_cache())
    assert part._tap is not None
    assert part._tap.last.shape[:2] == (1, 4)


def test_an_output_layer_that_is_split_is_kept_whole_for_them_and_weighs_once_more() -> None:
    made, network = drafts(), load_model(model_folder(HEADS), lazy=True)[0]
    network.language_model.lm_head = nn.Linear(64, 2048, bias=False)
    made.inspect_folder(model_folder(HEADS), network)
    part = ShardNetwork(network)
    before = made.weight_bytes(part)
    network.language_model.lm_head = nn.Linear(64, 1024, bias=False)  # its size as a shard
    assert made.weight_bytes(part) - before == 4 * 64 * 2048


def test_a_draft_model_is_loaded_whole_and_weighs_beside_the_part(tmp_path: Path) -> None:
    folder = model_folder("dense")
    made = drafts(use_mtp=False, draft_model=str(folder))
    split = ShardGroup("ring", "tensor")
    ShardLoader(str(folder), split, served_name="m", drafting=made).read(nothing)
    part = looked(drafts(use_mtp=False), "dense")
    assert made.weight_bytes(part) == (folder / "model.safetensors").stat().st_size
    found = made.drafter(split, part, can_verify=True)
    assert isinstance(found, DraftModelProposer)
    assert 0.9 < found.relative_cost < 1.1


def test_a_drafter_that_was_trained_for_a_model_is_refused_in_a_set() -> None:
    made = drafts(use_mtp=False, draft_model=str(model_folder(next(iter(DRAFTERS)))))
    with pytest.raises(ModelError, match="are not run in a set"):
        made.find()
