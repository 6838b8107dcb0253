"""Names and folders of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.serving import models
from deploy.supervisor.memory import weight_bytes
from protocol.model_folder import POCKET, name_of, problem_with
from worker.models.source import find_folder
from worker.pocket import MODEL_PATH


def test_pocket_is_the_embedded_model_wherever_a_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / POCKET).mkdir()
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "serve.toml"
    config.write_text('[models.small]\nmodel = "pocket"\ndraft_model = "pocket"\n')
    errors: list[str] = []
    named = {model.name: model.model for model in models.read(["pocket", "x=pocket"], str(config), errors)}
    assert (named, errors) == ({"pocket": "pocket", "x": "pocket", "small": "pocket"}, [])
    assert name_of(POCKET) == name_of(None) == POCKET
    assert problem_with(POCKET) is None
    assert weight_bytes(POCKET) == weight_bytes(None)
    assert find_folder(POCKET, lambda folder: None) == find_folder(None, lambda folder: None) == MODEL_PATH
    assert problem_with("./pocket") is not None, "a folder of this name is given with its path"
