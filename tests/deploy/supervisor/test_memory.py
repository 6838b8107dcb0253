"""Memory estimates of models from their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.supervisor.child import ServedModel
from deploy.supervisor.memory import all_weight_bytes, weight_bytes, weights_of
from tests.deploy.weights import EXPERT_BYTES, OTHER_BYTES, mixture, weights


def test_model_memory_is_the_size_of_its_weight_files(tmp_path: Path) -> None:
    folder = weights(tmp_path / "two", 1000, 500)
    (tmp_path / "two" / "other.safetensors").write_bytes(b"x" * 9)
    assert weight_bytes(folder) == 1500
    (tmp_path / "two" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 7}})
    )
    assert weight_bytes(folder) == 7
    assert weight_bytes(str(tmp_path / "nowhere")) is None
    embedded = weight_bytes(None)
    assert embedded > 10**5


def test_repository_memory_is_known_after_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--a" / "snapshots" / "0123"
    refs = tmp_path / "models--org--a" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0123")
    snapshot.parent.mkdir()
    weights(snapshot, 1234)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert weight_bytes("org/a") is None
    (snapshot / "config.json").write_text("{}")
    assert weight_bytes("org/a") == 1234


def test_a_draft_model_is_loaded_as_well(tmp_path: Path) -> None:
    for name, size in (("large", 1000), ("small", 30)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    model = ServedModel(name="a", model=str(tmp_path / "large"))
    assert weights_of(model) == 1000
    drafted = ServedModel(name="a", model=model.model, settings={"draft_model": str(tmp_path / "small")})
    assert weights_of(drafted) == 1030
    assert weights_of(ServedModel(name="a", model=str(tmp_path / "none"), settings=drafted.settings)) is None


@pytest.mark.parametrize(
    ("given", "experts"),
    [
        (2 * EXPERT_BYTES + 1, 2),
        (str(3 * EXPERT_BYTES), 3),
        (EXPERT_BYTES - 1, 8),  # its worker does not start
    ],
)
def test_experts_on_disk_take_no_memory(tmp_path: Path, given: int | str, experts: int) -> None:
    settings = {"experts_memory": given}
    model = ServedModel(name="a", model=mixture(tmp_path / "a"), settings=settings, replicas=2)
    assert weights_of(model) == OTHER_BYTES + experts * EXPERT_BYTES
    assert all_weight_bytes(model) == 2 * (OTHER_BYTES + experts * EXPERT_BYTES)
