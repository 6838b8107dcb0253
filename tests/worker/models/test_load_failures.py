"""Models that cannot be loaded: error messages and cleanup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub import constants, errors

from protocol.huggingface import transport_errors
from tests.worker.folders import copied, failure, nothing
from worker.contract.engine import ModelError, SamplingParams
from worker.models import load
from worker.models.config import read_config, require_known
from worker.models.explain import explain
from worker.models.load import ModelLoader
from worker.models.source import find_folder


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "no such folder" in failure(tmp_path / "nowhere")


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    assert f"{tmp_path} contains no config.json" in failure(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "\xff"])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    folder = copied(tmp_path)
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in failure(folder)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    for architecture in ("abacus9", "../../evil", "nn.mlp", "a.b-c", "-"):
        shutil.rmtree(tmp_path / "a-model", ignore_errors=True)
        message = failure(copied(tmp_path, model_type=architecture))
        assert f"does not know the architecture '{architecture}'" in message
    shutil.rmtree(tmp_path / "a-model")
    assert "names no model_type" in failure(copied(tmp_path, model_type=None))


@pytest.mark.parametrize("architecture", ["lfm2-vl", "lille-130m", "nemotron-nas"])
def test_a_hyphen_is_part_of_an_architectures_name(tmp_path: Path, architecture: str) -> None:
    folder = copied(tmp_path, model_type=architecture)
    require_known(read_config(folder, "x"), "x")


def test_an_architecture_whose_import_leaves_the_process_is_named(tmp_path: Path) -> None:
    message = failure(copied(tmp_path, model_type="olmo"))
    assert "needs a package for the architecture 'olmo' that is not installed" in message


def test_layers_of_another_device_are_no_reason_to_download_again(tmp_path: Path) -> None:
    config = read_config(copied(tmp_path), "x")
    message = explain(RuntimeError("[metal_kernel] No Metal back-end."), config)
    assert "made for another device than this machine has" in message
    assert "ownload" not in message


def test_a_config_the_architecture_cannot_be_built_from_is_named(tmp_path: Path) -> None:
    assert "cannot build the architecture 'qwen3'" in failure(copied(tmp_path, num_hidden_layers=None))


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


@pytest.mark.parametrize("change", [{"hidden_size": 96}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}])
def test_weights_that_do_not_fit_are_said_not_to(tmp_path: Path, change: dict[str, int]) -> None:
    assert "weights do not fit its config.json" in failure(copied(tmp_path, **change))


@pytest.mark.parametrize("keep", [0, 4, 1000, -100])
def test_truncated_weights_are_said_to_be(tmp_path: Path, keep: int) -> None:
    folder = copied(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "weights cannot be loaded" in failure(folder)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert "its tokenizer in" in failure(folder)


@pytest.mark.parametrize("fault", ["tokenizer", "architecture", "warm-up"])
def test_a_failed_load_leaves_no_weights_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder = copied(tmp_path, vocab_size=3 if fault == "architecture" else 2048)
    if fault == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    if fault == "warm-up":
        monkeypatch.setattr(
            load, "warm_up", lambda engine, rows: engine.start("row", ["no token"], 1, SamplingParams())
        )
    before = mx.get_active_memory()
    with pytest.raises(ModelError) as caught:
        ModelLoader(str(folder)).load(nothing)
    assert caught.value.__traceback__ is not None
    assert mx.get_active_memory() <= before
    assert mx.get_cache_memory() == 0


# --- Hugging Face --------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache on a machine that is offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_repository_that_is_not_here_is_not_fetched_offline(hub: Path) -> None:
    assert ModelLoader("some/model").name == "some/model"
    message = failure("some/model")
    assert message.startswith("some/model: ")
    assert "HF_HUB_OFFLINE" in message


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.RepositoryNotFoundError, "no such model"),
        (errors.GatedRepoError, "gated"),
        (errors.HfHubHTTPError, "cannot be downloaded"),
        (OSError, "No space left"),
    ],
)
def test_hugging_face_error_is_explained(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], words: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise error.__new__(error) if error is not OSError else OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert words in failure("some/model")


def test_an_unreachable_hub_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise errors.LocalEntryNotFoundError("cannot find")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert "cannot be reached" in failure("some/model")


def test_a_hub_that_hangs_up_is_said_not_to_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models--org--small-4bit").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def hang_up(*args: object, **kwargs: object) -> str:
        [kind] = transport_errors()
        raise kind("Server disconnected")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hang_up)
    assert "cannot be reached. Check the network" in failure("some/model")


def test_a_config_that_is_others_is_not_to_be_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    folder = copied(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    message = failure(folder)
    assert "config.json: permission denied" in message
    assert "ownload" not in message


def test_a_repository_is_looked_at_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[list[str]] = []
    folder = copied(tmp_path)

    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        fetched.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert ModelLoader("some/model").load(nothing).info.name == "some/model"
    assert fetched[0] == ["config.json"]
    assert "model*.safetensors" in fetched[1]
    (folder / "config.json").write_text('{"model_type": "abacus9"}')
    assert "abacus9" in failure("some/model")
    assert fetched[2:] == [["config.json"]]


def test_names_are_known_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model-4bit").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert ModelLoader("org/model-4bit").name == "model-4bit"
    assert ModelLoader("org/model-4bit/").name == "model-4bit"
    assert ModelLoader(".").name == tmp_path.name
    assert ModelLoader("mlx-community/Qwen3-0.6B-4bit").name == "mlx-community/Qwen3-0.6B-4bit"


def test_a_folder_that_is_misspelt_is_told_of_with_the_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "qwen-small").mkdir()
    assert "did you mean qwen-small?" in failure(tmp_path / "qwen-smal")


def test_an_id_that_the_hub_does_not_know_is_told_of_with_one_that_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models--org--small-4bit").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def refuse(*args: object, **kwargs: object) -> None:
        response = httpx.Response(404, request=httpx.Request("GET", "http://hub/api"))
        raise errors.RepositoryNotFoundError("404", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match="did you mean org/small-4bit\\?"):
        find_folder("org/small-4bt", lambda folder: None)
