"""Mixtures with many experts, for tests and measurements of experts from disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from tests.models.fixtures import model_folder

KINDS: dict[str, str] = {
    "qwen3_moe": "num_experts",
    "mixtral": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
}
"""The key of the number of experts in each family's config."""
GROUP = 32


def make_mixture(
    kind: str, folder: Path, *, experts: int = 16, layers: int = 3, bits: int | None = None, **changes: Any
) -> Path:
    """Write a random mixture into `folder`, made if absent, and return it. `bits`: quantized so; None:
    float32. `changes`: of its config.json."""
    shutil.copytree(model_folder(kind), folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {KINDS[kind]: experts, "num_hidden_layers": layers} | changes
    if bits is not None:
        config["quantization"] = {"group_size": GROUP, "bits": bits}
    model_class, arguments = _get_classes(config)
    mx.random.seed(7)
    network: Any = model_class(arguments.from_dict(config))
    network.apply(lambda array: 2 * array if array.ndim > 1 else array)  # answers that differ by prompt
    if bits is not None:
        nn.quantize(network, GROUP, bits, class_predicate=_is_quantized)
    weights: Any = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    file.write_text(json.dumps(config))
    return folder


def _is_quantized(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0
