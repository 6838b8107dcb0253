"""Which models can be sharded, and the errors that refuse others before their weights are read."""

from __future__ import annotations

import faulthandler
import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from protocol.hosts import Backend, Mode
from tests.models.fixtures import model_folder
from worker.interfaces import ModelError
from worker.load.options import LoadOptions
from worker.load.sharded.loader import ShardLoader
from worker.load.sharded.parallelism import JOIN_S_MAX, ShardGroup

NAME = "m"


def split(asked: Mode | None = None, *, size: int = 2, backend: Backend = "ring") -> ShardGroup:
    """Return a group that has not been joined, for the first of `size` ranks."""
    made = ShardGroup(backend, asked)
    made.size = size
    return made


def refusal(model: str | Path, split: ShardGroup, **options: bool) -> str:
    with pytest.raises(ModelError) as caught:
        ShardLoader(str(model), split, LoadOptions(served_name=NAME, **options)).read(
            lambda done, total: None
        )
    assert "parameter" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "group", "words"),
    [
        ("sliding", split(), r"m: mlx-lm cannot split the family 'gemma3_text'\. Run it on one machine"),
        ("dense", split("pipeline"), r"cannot split the family 'qwen3' by pipeline\. Use --split tensor\.$"),
        (
            "dense", split("tensor", size=3),
            r"its 4 heads \(num_attention_heads\) cannot be split over 3 ranks.*--split pipeline",
        ),
    ],
)  # fmt: skip
def test_refusal_names_what_else_a_family_can_be_split_by(name: str, group: ShardGroup, words: str) -> None:
    assert re.search(words, refusal(model_folder(name), group))


def test_a_model_that_sees_is_split_only_where_it_need_not(tmp_path: Path) -> None:
    folder = tmp_path / "seeing"
    shutil.copytree(model_folder("dense"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": {"depth": 1}}))
    assert "Add --text-only" in refusal(folder, split())
    assert "3 ranks" in refusal(folder, split("tensor", size=3), text_only=True)


@pytest.mark.parametrize(
    ("backend", "asked", "mode"),
    [("ring", None, "pipeline"), ("jaccl", None, "tensor"), ("ring", "tensor", "tensor")],
)
def test_backends_have_a_way_that_they_prefer(backend: Backend, asked: Mode | None, mode: Mode) -> None:
    class Able:
        model = type("Inner", (), {"pipeline": None})()
        shard = None

    class Sharded:
        shard = None

    assert split(asked, backend=backend)._mode_for(Able(), "f") == mode
    assert split(backend="ring")._mode_for(Sharded(), "f") == "tensor"


def test_a_join_that_hangs_ends_the_process_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []

    def later(seconds: float, *, exit: bool) -> None:
        said.append((seconds, exit))

    def init(**options: object) -> None:
        said.append("joins")
        raise RuntimeError("no route to host")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: said.append("cancelled"))
    monkeypatch.setattr(mx.distributed, "init", init)
    with pytest.raises(ModelError, match="cannot be joined by ring"):
        split().join()
    assert said == [(JOIN_S_MAX, True), "joins", "cancelled"]
