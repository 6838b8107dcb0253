"""Random adapters for the test models, as upstream's trainer would save them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


@dataclass(frozen=True)
class Recipe:
    """A random adapter. `keys`: layers as upstream names them in its config; empty: all in the blocks.
    `num_layers`: blocks from the last one. `kind`: `lora` or `dora`."""

    rank: int = 4
    scale: float = 2.0
    seed: int = 0
    kind: str = "lora"
    keys: Sequence[str] = ()
    num_layers: int = 100
    dtype: mx.Dtype = mx.float32


def upstream_layers(network: nn.Module, recipe: Recipe) -> nn.Module:
    """Convert a network's layers in place, with upstream's own function."""
    settings: dict[str, Any] = {"rank": recipe.rank, "scale": recipe.scale, "dropout": 0.0}
    if recipe.keys:
        settings["keys"] = list(recipe.keys)
    linear_to_lora_layers(network, recipe.num_layers, settings, use_dora=recipe.kind == "dora")
    return network


def make_adapter(model: Path, folder: Path, recipe: Recipe) -> Path:
    """Write an adapter for the model in the folder `model`; return its own `folder`."""
    network = load_model(model, lazy=True)[0]
    return save_adapter(upstream_layers(network, recipe), folder, recipe)


def save_adapter(network: nn.Module, folder: Path, recipe: Recipe) -> Path:
    """Write random weights for the converted layers of a network."""
    key = mx.random.key(recipe.seed)
    weights: dict[str, mx.array] = {}
    leaves: Any = tree_flatten(network.parameters())
    for name, array in sorted(leaves):
        leaf = name.rpartition(".")[2]
        if leaf not in ("lora_a", "lora_b", "m"):
            continue
        key, own = mx.random.split(key)
        drawn = mx.random.normal(array.shape, key=own)
        width = {"lora_a": array.shape[-1] if array.ndim == 3 else array.shape[0], "lora_b": recipe.rank}
        weights[name] = (array * (1 + 0.1 * drawn) if leaf == "m" else drawn * width[leaf] ** -0.5).astype(
            recipe.dtype
        )
    settings = {"rank": recipe.rank, "scale": recipe.scale, "dropout": 0.0}
    config = {
        "fine_tune_type": recipe.kind,
        "num_layers": recipe.num_layers,
        "lora_parameters": settings | ({"keys": list(recipe.keys)} if recipe.keys else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder
