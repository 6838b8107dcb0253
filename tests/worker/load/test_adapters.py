"""Adapter folders: mlx-lm's and PEFT's say the same, and a broken one is one sentence."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from tests.models.adapters import Recipe, make_adapter
from tests.models.fixtures import model_folder
from worker.interfaces import AdapterError
from worker.load.adapters import AdapterFolder, read_adapter
from worker.runner.lora import Adapters

BYTES_MAX = 2**24


@cache
def layers_of(name: str) -> dict[str, nn.Module]:
    return Adapters(load_model(model_folder(name), lazy=True)[0]).layers()


def read(name: str, folder: Path) -> AdapterFolder:
    return read_adapter(folder, layers_of(name), BYTES_MAX)


def as_peft(folder: Path, to: Path, inside: str = "", **config: Any) -> Path:
    """Write an adapter in PEFT's format, as it names the layers of transformers' models."""
    arrays: Any = mx.load(str(folder / "adapters.safetensors"))
    told = json.loads((folder / "adapter_config.json").read_text())["lora_parameters"]
    rank, weights = told["rank"], {}
    for name, array in arrays.items():
        path, _, leaf = name.removeprefix("language_model.").rpartition(".")
        before, _, layer = path.rpartition(".")
        if leaf == "m":
            weights[f"base_model.model.{inside}{path}.lora_magnitude_vector"] = array
            continue
        ends = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
        if array.ndim == 3:
            for number, part in enumerate(array):
                outer = before.replace("switch_mlp", f"experts.{number}")
                weights[f"base_model.model.{inside}{outer}.{layer}.{ends[leaf]}"] = part
        elif "embed_tokens" in path:
            embedding = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
            weights[f"base_model.model.{inside}{path}.{embedding[leaf]}"] = array.T
        else:
            weights[f"base_model.model.{inside}{path}.{ends[leaf]}"] = array.T
    to.mkdir()
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": told["scale"] * rank}
    (to / "adapter_config.json").write_text(json.dumps(plain | config))
    weights = {name: mx.contiguous(array) for name, array in weights.items()}
    mx.save_safetensors(str(to / "adapter_model.safetensors"), weights)
    return to


def same(one: AdapterFolder, other: AdapterFolder) -> bool:
    return one.weights.keys() == other.weights.keys() and all(
        own.scale == pytest.approx(other.weights[path].scale)
        and mx.array_equal(own.a, other.weights[path].a).item()
        and mx.array_equal(own.b, other.weights[path].b).item()
        for path, own in one.weights.items()
    )


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("dense", Recipe(3, keys=("self_attn.q_proj", "model.embed_tokens"))),
        ("dense", Recipe(3, kind="dora")),
        ("hybrid", Recipe(2)),
        ("qwen3_moe", Recipe(2)),
    ],
)
def test_both_formats_say_the_same(name: str, recipe: Recipe, tmp_path: Path) -> None:
    folder = make_adapter(model_folder(name), tmp_path / "mlx", recipe)
    own = read(name, folder)
    assert same(own, read(name, as_peft(folder, tmp_path / "peft")))
    assert same(own, read(name, as_peft(folder, tmp_path / "nested", inside="model.language_model.")))
    assert own.rank == recipe.rank
    assert own.digest != read(name, tmp_path / "peft").digest


def test_scales_of_peft_follow_its_patterns(tmp_path: Path) -> None:
    folder = make_adapter(model_folder("dense"), tmp_path / "mlx", Recipe(4))
    config = {"lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"q_proj": 32}}
    weights = read("dense", as_peft(folder, tmp_path / "peft", **config)).weights
    assert weights["model.layers.0.self_attn.q_proj"].scale == 16
    assert weights["model.layers.0.self_attn.k_proj"].scale == 4


def broken(folder: Path, what: str) -> None:
    """Damage an adapter of mlx-lm in one way."""
    config, weights = folder / "adapter_config.json", folder / "adapters.safetensors"
    arrays: Any = mx.load(str(weights))
    first = min(name for name in arrays if name.endswith("lora_a"))
    changes: dict[str, Any] = {
        "no such layer": {"model.layers.9.self_attn.q_proj.lora_a": arrays[first]},
        "half of it": {name: array for name, array in arrays.items() if name != first},
        "wrong shape": arrays | {first: mx.zeros((5, 4))},
        "not finite": arrays | {first: mx.full(arrays[first].shape, float("nan"))},
    }
    settings = json.loads(config.read_text())
    match what:
        case "no JSON":
            config.write_text("{")
        case "no scale":
            config.write_text(json.dumps(settings | {"lora_parameters": {"rank": 4}}))
        case "full":
            config.write_text(json.dumps(settings | {"fine_tune_type": "full"}))
        case "no weights":
            weights.unlink()
        case "cut":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "large":
            weights.write_bytes(bytes(BYTES_MAX + 1))
        case _:
            mx.save_safetensors(str(weights), changes[what])


BREAKS = {
    "no JSON": "is not JSON",
    "no scale": "lora_parameters.scale",
    "full": "'full'",
    "no weights": "neither adapters.safetensors nor adapter_model.safetensors",
    "cut": "cannot be read",
    "large": "bytes",
    "no such layer": "model.layers.9.self_attn.q_proj",
    "half of it": "not complete",
    "wrong shape": "do not fit",
    "not finite": "not finite",
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_adapter_is_one_sentence(what: str, tmp_path: Path) -> None:
    made = _made(tmp_path.parent / "whole adapter")
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    broken(folder, what)
    with pytest.raises(AdapterError, match=BREAKS[what]) as caught:
        read("dense", folder)
    assert str(tmp_path) not in str(caught.value)
    assert "\n" not in str(caught.value)


@cache
def _made(folder: Path) -> Path:
    return make_adapter(model_folder("dense"), folder, Recipe(4))


@pytest.mark.parametrize(
    "config",
    [{"peft_type": "IA3"}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"alpha_pattern": {"(": 3}}],
)
def test_what_peft_can_and_this_server_cannot_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    folder = as_peft(_made(tmp_path.parent / "whole adapter"), tmp_path / "peft", **config)
    with pytest.raises(AdapterError):
        read("dense", folder)
