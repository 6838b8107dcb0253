"""Model folders with sparse weight files of given sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

EXPERTS, EXPERT_BYTES, OTHER_BYTES = 8, 3 * 2 * 1000 * 4, 5000
"""Of a mixture: experts of a layer, the bytes of one in both layers, and those of its other tensors."""


def weights(folder: Path, *sizes: int) -> str:
    """Create a model folder with weight files of these sizes in bytes, and return its path."""
    folder.mkdir()
    for number, size in enumerate(sizes, 1):
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.truncate(size)
    return str(folder)


def mixture(folder: Path) -> str:
    """Create a model folder with a sparse file of a mixture in mlx-lm's layout, and return its path."""
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.mlp.switch_mlp.{name}.weight": (EXPERTS, 10, 100)
        for layer in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    shapes["model.norm.weight"] = (OTHER_BYTES // 4,)
    header, end = dict[str, object]({"__metadata__": {"format": "mlx"}}), 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        file.truncate(8 + len(told) + end)
    index = {"metadata": {"total_size": end}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)
