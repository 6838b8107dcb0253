"""Who guesses what a set says: on its first rank alone, and by what all of them compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from tests.models.drafters import DRAFTERS
from tests.models.fixtures import model_folder
from tests.models.heads import HEADS
from tests.worker.folders import nothing
from worker.contract import ModelError
from worker.engine.following import Followers
from worker.engine.heads import Heads
from worker.models.part import PartLoader
from worker.models.partdrafts import PartDrafts
from worker.models.split import PartNetwork, Split


def drafts(*, leads: bool = True, uses_heads: bool = True, draft_model: str | None = None) -> PartDrafts:
    return PartDrafts("m", draft_model=draft_model, uses_heads=uses_heads, leads=leads, trials=None)


def looked(made: PartDrafts, name: str = HEADS) -> PartNetwork:
    """A part that is the whole, at which it has looked."""
    network: Any = load_model(model_folder(name), lazy=True)[0]
    made.look(model_folder(name), network)
    return PartNetwork(network)


def is_listening(part: PartNetwork) -> bool:
    return part._tap is not None


@pytest.mark.parametrize("leads", [True, False])
def test_all_compute_what_the_first_one_guesses_by(leads: bool) -> None:
    made = drafts(leads=leads)
    part = looked(made)
    found = made.drafter(Split("ring", None), part, ahead=True)
    assert isinstance(found, Heads) == leads
    assert is_listening(part)
    part(mx.array([[1, 2, 3, 4]], mx.uint32), cache=part.make_cache())
    assert part._tap is not None
    assert part._tap.last.shape[:2] == (1, 4)


def test_nobody_guesses_where_rows_cannot_be_fed_guesses() -> None:
    made = drafts()
    part = looked(made)
    assert made.drafter(Split("ring", None), part, ahead=False) is None
    assert not is_listening(part)


def test_a_model_without_such_layers_has_none_that_guess() -> None:
    made = drafts()
    part = looked(made, "dense")
    assert made.drafter(Split("ring", None), part, ahead=True) is None
    assert made.weight_bytes(part) == 0


def test_an_output_layer_that_is_split_is_kept_whole_for_them_and_weighs_once_more() -> None:
    made, network = drafts(), load_model(model_folder(HEADS), lazy=True)[0]
    network.language_model.lm_head = nn.Linear(64, 2048, bias=False)
    made.look(model_folder(HEADS), network)
    part = PartNetwork(network)
    before = made.weight_bytes(part)
    network.language_model.lm_head = nn.Linear(64, 1024, bias=False)  # as it is split
    assert made.weight_bytes(part) - before == 4 * 64 * 2048


def test_a_draft_model_is_loaded_whole_and_weighs_beside_the_part(tmp_path: Path) -> None:
    folder = model_folder("dense")
    made = drafts(uses_heads=False, draft_model=str(folder))
    split = Split("ring", "tensor")
    PartLoader(str(folder), split, served_name="m", drafts=made).read(nothing)
    part = looked(drafts(uses_heads=False), "dense")
    assert made.weight_bytes(part) == (folder / "model.safetensors").stat().st_size
    found = made.drafter(split, part, ahead=True)
    assert isinstance(found, Followers)
    assert 0.9 < found.share < 1.1


def test_a_drafter_that_was_trained_for_a_model_is_refused_in_a_set() -> None:
    made = drafts(uses_heads=False, draft_model=str(model_folder(next(iter(DRAFTERS)))))
    with pytest.raises(ModelError, match="are not run in a set"):
        made.find()
