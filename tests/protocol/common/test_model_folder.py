"""Names and folders of models."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from deploy.serving import models
from deploy.supervisor.memory import weight_bytes
from protocol.common.model_folder import POCKET, name_of, original_name, problem_with
from worker.load.source import find_folder
from worker.pocket import MODEL_PATH


def test_pocket_is_the_embedded_model_wherever_a_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / POCKET).mkdir()
    monkeypatch.chdir(tmp_path)
    text = '[models.small]\nmodel = "pocket"\ndraft_model = "pocket"\n'
    errors: list[str] = []
    found = models.read(["pocket", "x=pocket"], tomllib.loads(text)["models"], "FILE", errors)
    named = {model.name: model.model for model in found}
    assert (named, errors) == ({"pocket": "pocket", "x": "pocket", "small": "pocket"}, [])
    assert name_of(POCKET) == name_of(None) == POCKET
    assert problem_with(POCKET) is None
    assert weight_bytes(POCKET) == weight_bytes(None)
    assert find_folder(POCKET, lambda folder: None) == find_folder(None, lambda folder: None) == MODEL_PATH
    assert problem_with("./pocket") is not None, "a folder of this name is given with its path"


def test_a_folder_is_called_as_it_was_typed_and_a_snapshot_by_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--acme--Tiny-Chat" / "snapshots" / ("0123456789" * 4)
    below = tmp_path / "v1" / "below"
    for folder in (snapshot, below):
        folder.mkdir(parents=True)
    for link, target in (("current", below.parent), ("tiny", snapshot), ("cache", snapshot.parents[1])):
        (tmp_path / link).symlink_to(target)
    monkeypatch.chdir(below)
    monkeypatch.setenv("HOME", str(tmp_path))
    named = {
        "current": ["~/current", f"{tmp_path}/current/", "~/current/.", "../../current"],
        "below": [".", "./", "../below"],
        "v1": ["..", "~/current/below/..", "~/v1"],
        "acme/Tiny-Chat": [str(snapshot), "~/tiny/", f"~/cache/snapshots/{snapshot.name}", "acme/Tiny-Chat"],
    }
    for name, words in named.items():
        assert [name_of(word) for word in words] == [name] * len(words)
    monkeypatch.chdir(snapshot.parent)
    assert name_of(f"./{snapshot.name}") == "acme/Tiny-Chat"
    assert [original_name(word) for word in ("~/current", "~/tiny", None)] == ["v1", "acme/Tiny-Chat", POCKET]
