"""Adapter folders: mlx-lm's (`adapters.safetensors`) and PEFT's (`adapter_model.safetensors`).

Both are read into mlx-lm's layout, and checked against the model's layers. PEFT names a layer as transformers
does: it is found by its path without the containers that differ between the libraries. PEFT has a matrix for
each expert; they are stacked as mlx-lm stacks the experts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from protocol.adapters import ADAPTERS_MAX
from protocol.types import AdapterInfo
from worker.interfaces import AdapterError
from worker.runner.lora import Adapters, LayerWeights, kind_of

CONFIG = "adapter_config.json"
CONFIG_BYTES_MAX = 2**20
HASHED_BYTES = 2**20
_CONTAINERS = {"base_model", "model", "language_model", "text_model", "transformer"}
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)")
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_PEFT_LEAVES = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "m",
    "lora_magnitude_vector.weight": "m",
}

Layers = Mapping[str, nn.Module]
Parts = dict[str, dict[str, mx.array]]
"""The arrays `a`, `b` and `m` (the magnitude) of each layer, by its path."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter that was read. `digest`: hexadecimal, of its files."""

    weights: Mapping[str, LayerWeights]
    digest: str

    @property
    def rank(self) -> int:
        """The highest rank of a layer."""
        return max(own.a.shape[1] for own in self.weights.values())


class ServedAdapters:
    """`AdapterSet` of a model."""

    def __init__(self, adapters: Adapters) -> None:
        """`adapters`: the engine's."""
        self._adapters = adapters
        self._infos: dict[str, AdapterInfo] = {}

    @property
    def infos(self) -> list[AdapterInfo]:
        return list(self._infos.values())

    def load(self, name: str, folder: Path, bytes_max: int) -> AdapterInfo:
        if name in self._infos:
            raise AdapterError("it is loaded already")
        if len(self._infos) >= ADAPTERS_MAX:
            raise AdapterError(f"the model has {ADAPTERS_MAX} adapters, the maximum")
        found = read_adapter(folder, self._adapters.layers(), bytes_max)
        self._adapters.add(name, found.weights)
        nbytes = self._adapters.names[name]
        if nbytes > bytes_max:
            self._adapters.remove(name)
            raise AdapterError(f"it takes {nbytes} bytes beside the others, of which {bytes_max} are left")
        info = AdapterInfo(
            name=name, digest=found.digest, rank=found.rank, bytes=max(0, nbytes), folder=str(folder)
        )
        self._infos[name] = info
        return info

    def unload(self, name: str) -> None:
        self._infos.pop(name, None)
        self._adapters.remove(name)


def read_adapter(folder: Path, layers: Layers, bytes_max: int) -> AdapterFolder:
    """Read a folder for a model with these `layers`, by path. Raises `AdapterError`; no text of it names a
    folder."""
    config = _read_config(folder / CONFIG)
    files: dict[str, Callable[[dict[str, mx.array], dict[str, Any], Layers], dict[str, LayerWeights]]] = {
        "adapters.safetensors": _of_mlx,
        "adapter_model.safetensors": _of_peft,
    }
    found = [name for name in files if (folder / name).is_file()]
    if not found:
        raise AdapterError(f"it has neither {' nor '.join(files)}")
    file = folder / found[0]
    if file.stat().st_size > bytes_max:
        raise AdapterError(f"its weights take {file.stat().st_size} bytes, of which {bytes_max} are left")
    try:
        arrays: Any = mx.load(str(file))
    except (RuntimeError, OSError, ValueError) as error:
        raise AdapterError(f"{file.name} cannot be read") from error
    weights = files[file.name](arrays, config, layers)
    if not weights:
        raise AdapterError(f"{file.name} has no weights of an adapter")
    for path, own in weights.items():
        _check(path, layers[path], own)
    return AdapterFolder(weights, _digest([folder / CONFIG, file]))


def _read_config(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            config = json.loads(opened.read(CONFIG_BYTES_MAX))
    except OSError:
        raise AdapterError(f"it has no {CONFIG} that can be read") from None
    except ValueError:
        raise AdapterError(f"its {CONFIG} is not JSON") from None
    if not isinstance(config, dict):
        raise AdapterError(f"its {CONFIG} is not an object")
    return config


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while part := opened.read(HASHED_BYTES):
                digest.update(part)
    return digest.hexdigest()


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{name} in its {CONFIG} is not a number")
    return float(value)


# --- mlx-lm ---


def _of_mlx(arrays: dict[str, mx.array], config: dict[str, Any], layers: Layers) -> dict[str, LayerWeights]:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise AdapterError(f"it is of the kind {str(kind)[:40]!r}, and lora and dora can be served")
    settings = config.get("lora_parameters")
    scale = _number(settings.get("scale") if isinstance(settings, dict) else None, "lora_parameters.scale")
    parts: Parts = {}
    leaves = {"lora_a": "a", "lora_b": "b", "m": "m"}
    for name, array in arrays.items():
        path, _, leaf = name.rpartition(".")
        if leaf not in leaves:
            raise AdapterError(f"{name} is no weight of an adapter")
        parts.setdefault(path, {})[leaves[leaf]] = array
    return {path: _layer(path, found, scale, kind == "dora", layers) for path, found in parts.items()}


def _layer(
    path: str, found: dict[str, mx.array], scale: float, is_dora: bool, layers: Layers
) -> LayerWeights:
    if path not in layers:
        raise AdapterError(f"it changes {path}, which is no layer of the model that can be changed")
    if "a" not in found or "b" not in found or ("m" in found) != is_dora:
        raise AdapterError(f"its weights of {path} are not complete")
    return LayerWeights(found["a"], found["b"], scale, found.get("m"))


# --- PEFT ---


def _of_peft(arrays: dict[str, mx.array], config: dict[str, Any], layers: Layers) -> dict[str, LayerWeights]:
    _require_plain(config)
    by_name = _by_canonical(layers)
    parts: Parts = {}
    experts: dict[str, dict[int, dict[str, mx.array]]] = {}
    scales: dict[str, float] = {}
    for name, array in arrays.items():
        module, leaf = _peft_leaf(name)
        found = parts.setdefault(module, {})
        found[leaf] = array
    done: dict[str, LayerWeights] = {}
    for module, found in parts.items():
        if "a" not in found or "b" not in found:
            raise AdapterError(f"its weights of {module} are not complete")
        scale = _peft_scale(module, found["a"].shape[0], config)
        if (match := _EXPERT.fullmatch(module)) is not None:
            path = _expert_path(match, by_name)
            experts.setdefault(path, {})[int(match[2])] = found
            if scales.setdefault(path, scale) != scale:
                raise AdapterError(f"the experts of {path} have different scales")
            continue
        path = by_name.get(_canonical(module), "")
        if not path:
            raise AdapterError(f"it changes {module}, which is no layer of the model that can be changed")
        magnitude = found["m"].reshape(-1) if "m" in found else None
        done[path] = LayerWeights(found["a"].T, found["b"].T, scale, magnitude)
    return done | {path: _stacked(path, each, scales[path], layers) for path, each in experts.items()}


def _require_plain(config: dict[str, Any]) -> None:
    """Refuse what changes the model in other ways than LoRA and DoRA do."""
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"it is of the kind {str(config['peft_type'])[:40]!r}, and LORA can be served")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"it changes biases (“bias” in its {CONFIG})")
    for name in (
        "modules_to_save",
        "fan_in_fan_out",
        "lora_bias",
        "trainable_token_indices",
        "megatron_config",
    ):
        if config.get(name):
            raise AdapterError(f"{name} in its {CONFIG} is not supported")


def _peft_leaf(name: str) -> tuple[str, str]:
    for suffix, leaf in _PEFT_LEAVES.items():
        if name.endswith("." + suffix):
            return name.removesuffix("." + suffix).removeprefix("base_model.model."), leaf
    raise AdapterError(f"{name} is no weight of an adapter")


def _peft_scale(module: str, rank: int, config: dict[str, Any]) -> float:
    alpha = config.get("lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    try:
        keys = [key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", module)]
    except (re.error, TypeError):
        raise AdapterError(f"alpha_pattern in its {CONFIG} cannot be read") from None
    alpha = _number(patterns[keys[0]] if keys else alpha, "lora_alpha")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _canonical(path: str) -> str:
    """Return a layer's path without the containers that differ between transformers and MLX."""
    return ".".join(part for part in path.split(".") if part not in _CONTAINERS)


def _by_canonical(layers: Layers) -> dict[str, str]:
    names: dict[str, str] = {}
    for path in layers:
        name = _canonical(path)
        names[name] = "" if name in names else path
    return names


def _expert_path(match: re.Match[str], by_name: Mapping[str, str]) -> str:
    before, leaf = _canonical(match[1]), _EXPERT_NAMES.get(match[3], match[3])
    for inner in ("switch_mlp", "experts"):
        if path := by_name.get(f"{before}.{inner}.{leaf}", ""):
            return path
    raise AdapterError(f"it changes {match[0]}, which is no layer of the model that can be changed")


def _stacked(
    path: str, found: Mapping[int, dict[str, mx.array]], scale: float, layers: Layers
) -> LayerWeights:
    """Stack the matrices of experts; those that are left out are zeros."""
    count, outputs, inputs = _experts_of(layers[path])
    if max(found) >= count or any("m" in each for each in found.values()):
        raise AdapterError(f"its weights of {path} do not fit: the model has {count} experts, without DoRA")
    first = next(iter(found.values()))
    rank = first["a"].shape[0]
    nothing = mx.zeros((rank, inputs), first["a"].dtype), mx.zeros((outputs, rank), first["b"].dtype)
    pairs = [(found[n]["a"], found[n]["b"]) if n in found else nothing for n in range(count)]
    if len({(a.shape, b.shape) for a, b in pairs}) > 1:
        raise AdapterError(f"its weights of {path} have different shapes")
    return LayerWeights(mx.stack([a for a, _ in pairs]), mx.stack([b for _, b in pairs]), scale)


# --- shapes ---


def _experts_of(layer: Any) -> tuple[int, int, int]:
    return int(layer.num_experts), int(layer.output_dims), int(layer.input_dims)


def _shape_of(layer: Any) -> tuple[int, int]:
    """Return the sizes of a layer's weight, dequantized: [outputs, inputs], or [tokens, width]."""
    rows, columns = layer.weight.shape
    return rows, layer.scales.shape[-1] * layer.group_size if "scales" in layer else columns


def _check(path: str, layer: nn.Module, own: LayerWeights) -> None:
    """Raise `AdapterError` if the weights do not fit the layer."""
    a, b = own.a.shape, own.b.shape
    expected: tuple[tuple[int, ...], tuple[int, ...]]
    if kind_of(layer) == "experts":
        count, outputs, inputs = _experts_of(layer)
        expected = (count, a[1] if len(a) == 3 else 0, inputs), (count, outputs, a[1] if len(a) == 3 else 0)
    else:
        outputs, inputs = _shape_of(layer)
        if kind_of(layer) == "embedding":
            outputs, inputs = inputs, outputs
        rank = a[1] if len(a) == 2 else 0
        expected = (inputs, rank), (rank, outputs)
    if (tuple(a), tuple(b)) != expected or 0 in a:
        raise AdapterError(
            f"its weights of {path} have the shapes {tuple(a)} and {tuple(b)}, which do not fit"
        )
    if own.magnitude is not None and (kind_of(layer) != "linear" or own.magnitude.shape != (outputs,)):
        raise AdapterError(f"its magnitudes of {path} do not fit: DoRA is for linear layers")
    arrays = [own.a, own.b, *([] if own.magnitude is None else [own.magnitude])]
    if not all(mx.issubdtype(array.dtype, mx.floating) for array in arrays):
        raise AdapterError(f"its weights of {path} are not floating-point numbers")
    if not all(mx.isfinite(array).all().item() for array in arrays):
        raise AdapterError(f"its weights of {path} are not finite")
