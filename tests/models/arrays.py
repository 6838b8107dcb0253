"""Named arrays of a module or a file, with narrower types than upstream's functions have."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten


def named_parameters(module: nn.Module) -> list[tuple[str, mx.array]]:
    """Return every parameter of a module with its name."""
    parameters = tree_flatten(module.parameters())
    assert isinstance(parameters, list)
    return parameters


def load_arrays(path: Path) -> dict[str, mx.array]:
    """Return the arrays of a safetensors file by name."""
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    return dict(arrays)
