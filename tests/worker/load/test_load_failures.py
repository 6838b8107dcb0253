"""Models that cannot be loaded: error messages and cleanup."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import constants, errors

from protocol.common.huggingface import transport_errors
from tests.models.fixtures import model_folder
from tests.worker.folders import copied, failure, nothing
from worker.interfaces import Model, ModelError
from worker.load import load
from worker.load.config import read_config
from worker.load.explain import explain
from worker.load.load import ModelLoader
from worker.values import SamplingParams


def test_a_missing_folder_is_named_and_one_without_a_config_is_no_model(tmp_path: Path) -> None:
    assert "no such folder" in failure(tmp_path / "nowhere")
    assert f"{tmp_path} contains no config.json" in failure(tmp_path)
    (tmp_path / "qwen-small").mkdir()
    assert "did you mean qwen-small?" in failure(tmp_path / "qwen-smal")


def test_the_root_of_a_cache_folder_says_where_the_model_is(tmp_path: Path) -> None:
    copied(tmp_path).rename((tmp_path / "snapshots").resolve())
    inner = tmp_path / "snapshots" / "abc"
    inner.mkdir()
    for file in (tmp_path / "snapshots").iterdir():
        if file.is_file():
            file.rename(inner / file.name)
    assert failure(tmp_path).endswith(f"is a cache of downloads; give {inner}.")


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    folder = copied(tmp_path)
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in failure(folder)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    for architecture in ("abacus9", "../../evil", "nn.mlp"):
        shutil.rmtree(tmp_path / "a-model", ignore_errors=True)
        message = failure(copied(tmp_path, model_type=architecture))
        assert f"does not know the architecture '{architecture}'" in message
    shutil.rmtree(tmp_path / "a-model")
    assert "names no model_type" in failure(copied(tmp_path, model_type=None))


def test_a_folder_without_weights_says_what_it_has_instead(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "contains no weights" in failure(folder)
    (folder / "pytorch_model.bin").touch()
    assert "only .bin, which MLX cannot load" in failure(folder)


def test_a_missing_part_of_the_weights_is_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in failure(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json cannot be read" in failure(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").rename(folder / "model-00002-of-00003.safetensors")
    assert "2 of its weight files are missing" in failure(folder)


@pytest.mark.parametrize("whole", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_an_index_that_a_conversion_has_left_behind_is_nothing(tmp_path: Path, whole: str) -> None:
    folder = copied(tmp_path)
    (folder / "model.safetensors").rename(folder / whole)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert isinstance(ModelLoader(str(folder)).load(nothing), Model)


def test_files_that_another_download_has_left_are_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    message = failure(folder)
    assert "both model-00001-of-00001.safetensors and model.safetensors" in message
    assert "Remove it." in message


def test_eight_bits_without_scales_are_no_weights(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    name, shape = next((name, array.shape) for name, array in weights.items() if array.ndim == 2)
    as_saved = {each: np.array(array.astype(mx.float32)) for each, array in weights.items() if each != name}
    header_of_fp8(folder / "model.safetensors", as_saved, name, shape)
    message = failure(folder)
    assert f"1 of its tensors are FP8 without scales (for example {name})" in message


def header_of_fp8(file: Path, weights: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> None:
    """Write weights, one of them in a type that NumPy and MLX do not have."""
    count = math.prod(shape)
    entries: dict[str, Any] = {name: {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [0, count]}}
    body = [bytes(count)]
    for other, array in weights.items():
        first = sum(map(len, body))
        body.append(array.tobytes())
        offsets = [first, first + array.nbytes]
        entries[other] = {"dtype": "F32", "shape": array.shape, "data_offsets": offsets}
    header = json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(body))


def test_a_key_is_missing_in_the_file_that_would_have_it() -> None:
    config = read_config(model_folder("dense"), "dense")
    assert "weights have no tensor 'model.norm.weight'" in explain(KeyError("model.norm.weight"), config)
    assert "config.json has no 'quant_method'" in explain(KeyError("quant_method"), config)


def test_missing_tensors_and_keys_are_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    name = next(name for name in weights if name.endswith("norm.weight"))
    del weights[name]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    assert name in failure(folder)
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {"bits": 4, "group_size": 32, "method": "x"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "its config.json has no 'quant_method'" in failure(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 96}, "weights do not fit its config.json"),
        ({"num_hidden_layers": 1}, "weights do not fit its config.json"),
        ({"num_hidden_layers": None}, "cannot build the architecture 'qwen3'"),
    ],
)
def test_weights_that_do_not_fit_are_said_not_to(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    assert words in failure(copied(tmp_path, **change))


def test_truncated_weights_and_a_missing_tokenizer_are_said_to_be(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for keep in (4, -100):
        weights.write_bytes(whole[:keep])
        assert "weights cannot be loaded" in failure(folder)
    weights.write_bytes(whole)
    (folder / "tokenizer.json").unlink()
    assert "its tokenizer in" in failure(folder)


@pytest.mark.parametrize("fault", ["tokenizer", "architecture", "warm-up"])
def test_a_failed_load_leaves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    folder = copied(tmp_path, vocab_size=3 if fault == "architecture" else 2048)
    if fault == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    if fault == "warm-up":
        params = SamplingParams()
        monkeypatch.setattr(load, "warm_up", lambda engine, rows: engine.start("row", ["x"], 1, params))
    before = mx.get_active_memory()
    with pytest.raises(ModelError) as caught:
        ModelLoader(str(folder)).load(nothing)
    assert caught.value.__traceback__ is not None
    assert mx.get_active_memory() <= before
    assert mx.get_cache_memory() == 0


# --- Hugging Face --------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_repository_not_here_is_not_fetched_offline(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ModelLoader("some/model").name == "some/model"
    message = failure("some/model")
    assert message.startswith("some/model: ")
    assert "HF_HUB_OFFLINE" in message


def refusing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def http_error(kind: type[errors.HfHubHTTPError], status: int = 404) -> Exception:
    return kind("no", response=httpx.Response(status, request=httpx.Request("GET", "http://hub/api")))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.RepositoryNotFoundError), "no such model"),
        (http_error(errors.GatedRepoError), "gated"),
        (OSError(28, "No space left on device"), "No space left"),
        (errors.LocalEntryNotFoundError("cannot find"), "cannot be reached"),
        (next(iter(transport_errors()))("Server disconnected"), "cannot be reached. Check the network"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hugging_face_error_is_explained(
    hub: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    refusing(monkeypatch, error)
    assert words in failure("some/model")


def test_a_config_is_fetched_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[list[str]] = []
    folder = copied(tmp_path)

    def snapshot(repository: str, allow_patterns: list[str], **_: bool) -> str:
        fetched.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert ModelLoader("some/model").load(nothing).info.name == "some/model"
    assert fetched[0] == ["config.json"]
    assert "model*.safetensors" in fetched[1]
    (folder / "config.json").write_text('{"model_type": "abacus9"}')
    assert "abacus9" in failure("some/model")
    assert fetched[2:] == [["config.json"]]
