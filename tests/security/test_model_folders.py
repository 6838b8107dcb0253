"""Hostile model folders: no code of a model runs, whatever its files ask for, and no pickle is read."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.fixtures import model_folder
from tests.worker.folders import copied, failure, nothing
from worker.interfaces import Model, ModelError
from worker.load.config import read_config
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
from worker.load.sharded.loader import ShardLoader
from worker.load.sharded.parallelism import ShardGroup

CODE = "its config.json asks to run code of its own (model_file), which is never done."


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A file that hostile code would create."""
    return tmp_path / "ran"


def write_code(folder: Path, ran: Path) -> None:
    """Write a module that leaves a trace when it is imported."""
    code = f"open({str(ran)!r}, 'w').close()\nclass Evil:\n    pass\n"
    (folder / "evil.py").write_text(code)


class Trace:
    """An object whose unpickling leaves a trace."""

    def __init__(self, ran: Path) -> None:
        self._ran = ran

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._ran), "w")


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("dense", "generate"),
        ("gemma3-eyes", "generate"),
        ("qwen3-reranker", "rerank"),
        ("bert-embedder", "embed"),
    ],
)
def test_code_of_a_config_is_refused_for_every_task(model: str, task: str, tmp_path: Path, ran: Path) -> None:
    folder = copied(tmp_path, model, model_file="evil.py")
    write_code(folder, ran)
    assert failure(folder, task=task).endswith(CODE)
    with pytest.raises(ModelError, match="code of its own"):
        read_config(folder, "a draft model")
    assert not ran.exists()


TRUSTING = """
import sys
from transformers import AutoTokenizer
from tests.worker.folders import nothing
from worker.load.load import ModelLoader

ModelLoader(sys.argv[1]).load(nothing)
AutoTokenizer.from_pretrained(sys.argv[2], trust_remote_code=True)
"""
"""What a processor of mlx-vlm does once a worker has loaded its model."""


def test_code_of_a_tokenizer_never_runs_even_for_a_trusting_caller(tmp_path: Path, ran: Path) -> None:
    folder = copied(tmp_path, model_type="no-model-of-transformers")
    write_code(folder, ran)
    file = folder / "tokenizer_config.json"
    named = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    words = [sys.executable, "-c", TRUSTING, str(model_folder("dense")), str(folder)]
    env = os.environ | {"HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert "run code of their own (auto_map), which is never done" in done.stderr
    assert not ran.exists()


def load_whole() -> None:
    ModelLoader("/nowhere/at/all").load(nothing)


def load_shard() -> None:
    split = ShardGroup("ring", None)
    split.size = 2
    ShardLoader("/nowhere/at/all", split, LoadOptions(served_name="m")).read(nothing)


@pytest.mark.parametrize("load", [load_whole, load_shard])
def test_loader_forbids_remote_code(load: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    for name in ("get_cached_module_file", "get_class_in_module"):
        monkeypatch.setattr(dynamic_module_utils, name, lambda *given, **options: None)
    with pytest.raises(ModelError, match="no such folder"):
        load()
    for name in ("get_cached_module_file", "get_class_in_module"):
        with pytest.raises(ModelError, match="never done"):
            getattr(dynamic_module_utils, name)("evil.Evil", "a-model")


def test_model_whose_tokenizer_names_code_is_served_without_it(tmp_path: Path, ran: Path) -> None:
    folder = copied(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    write_code(folder, ran)
    assert isinstance(ModelLoader(str(folder)).load(nothing), Model)
    assert not ran.exists()


def test_pickled_weights_are_never_read(tmp_path: Path, ran: Path) -> None:
    folder = tmp_path / "a-model"
    shutil.copytree(model_folder("dense"), folder)
    weights = next(folder.glob("model*.safetensors"))
    for name in ("pytorch_model.bin", "model.pth", "model.pkl", "adapters.npz"):
        (folder / name).write_bytes(pickle.dumps(Trace(ran)))
    assert isinstance(ModelLoader(str(folder)).load(nothing), Model)
    weights.write_bytes(pickle.dumps(Trace(ran)))
    failure(folder)
    weights.unlink()
    assert "no weights" in failure(folder)
    assert not ran.exists()


def test_template_cannot_reach_python(tmp_path: Path, ran: Path) -> None:
    folder = copied(tmp_path)
    escape = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch "
        f"{ran}') }}"
    )
    (folder / "chat_template.jinja").write_text(escape)
    with contextlib.suppress(ModelError):  # a template that fails is refused, or its model has none
        ModelLoader(str(folder)).load(nothing)
    assert not ran.exists()
