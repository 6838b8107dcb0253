"""A group of real processes over loopback: one of the scenarios of `python -m tests.worker.ranks.lives`."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.models.families import REFUSED
from tests.worker.ranks import ssh_stand_in
from tests.worker.ranks.lives import PIPELINE, TENSOR, Case, live

ROWS = 3
"""Rows per scenario; `make soak LANES=sets` runs more scenarios with more rows."""
HERITAGE = {"qwen3_5_moe"}
"""Families that inherit their sharding method."""
NO_ROOM = {"bailing_hybrid"}
"""Families sharded between groups of layers, of which a tiny model has one."""


@pytest.mark.timeout(200)
def test_ranks_answer_as_one_process_also_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    shutil.copy(ssh_stand_in.__file__, ssh)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    # `tests.faults.test_ranks` compares the answers of tensor parallelism.
    assert live(Case.of("qwen3_moe:pipeline:2:lookup"), range(1), host="mac-2", rows=ROWS).wrong == []
    said = {name: (tmp_path / name).read_text() for name in ("host", "command", "input", "output")}
    assert said["host"] == "mac-2"
    assert "follows rank 0" in said["output"]
    # Everybody can read a command line, and the log has all output: neither contains the keys.
    keys = json.loads(said["input"])
    assert len(keys) == 3
    assert not any(key in said["command"] + said["output"] for key in keys)


def _sources() -> dict[str, str]:
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    return {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}


def test_every_family_that_upstream_can_split_is_named() -> None:
    sources = _sources()
    sharded = {name for name, text in sources.items() if _has_method(text, "shard")}
    mixin, texts = "PipelineMixin", sources.items()
    piped = {name for name, text in texts if mixin in text or _has_method(text, "pipeline")}
    piped.remove("pipeline")  # the module that defines the mixin
    assert sharded - set(REFUSED) == set(TENSOR) - HERITAGE
    assert piped - set(REFUSED) - NO_ROOM == set(PIPELINE)


def _has_method(text: str, name: str) -> bool:
    if f"def {name}(" not in text:  # parsing takes longer than all else
        return False
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return any(isinstance(part, ast.FunctionDef) and part.name == name for c in classes for part in c.body)
