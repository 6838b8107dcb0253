"""The weights file: the language model's matrices in 8 bits, as MLX quantizes, everything else in float32.

A group of `GROUP` numbers of a row is stored as integers from 0 to 255, four to a word, the first in its
lowest byte, with its own scale and minimum: number = integer · scale + bias. Scales are float32, so MLX
computes in float32, and the evaluated model equals the served one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

GROUP = 64
BITS = 8
SETTINGS = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
"""The value of `quantization` in config.json."""

_STEPS = 2**BITS - 1
_SHIFTS = torch.arange(0, 32, BITS)


def write(model: Any, path: Path) -> None:
    """Write all weights of `model`; the tied head is the embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if _is_quantized(name, tensor):
            stem = name.removesuffix(".weight")
            words, scales, biases = quantize(tensor)
            tensors |= {name: words, f"{stem}.scales": scales, f"{stem}.biases": biases}
        else:
            tensors[name] = tensor.contiguous()
    path.write_bytes(save(tensors, metadata={"format": "pt"}))


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights by name, all of them float32."""
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".scales")]:
        stem = name.removesuffix(".scales")
        words, scales, biases = tensors[f"{stem}.weight"], tensors.pop(name), tensors.pop(f"{stem}.biases")
        tensors[f"{stem}.weight"] = dequantize(words, scales, biases)
    return tensors


def quantize(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [rows, columns] as words [rows, columns / 4], and scales and biases [rows, columns / GROUP]."""
    runs = matrix.detach().float().reshape(len(matrix), -1, GROUP)
    least, most = runs.amin(-1, keepdim=True), runs.amax(-1, keepdim=True)
    scales = ((most - least) / _STEPS).clamp(min=1e-12)
    steps = ((runs - least) / scales).round().clamp(0, _STEPS).long().reshape(len(matrix), -1, 32 // BITS)
    words = (steps << _SHIFTS).sum(-1).to(torch.uint32)
    return words, scales.squeeze(-1).contiguous(), least.squeeze(-1).contiguous()


def dequantize(words: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """Return the input of `quantize`, with an error of up to half a step."""
    steps = (words.long().unsqueeze(-1) >> _SHIFTS) & _STEPS
    runs = steps.reshape(len(words), -1, GROUP).float()
    return (runs * scales.unsqueeze(-1) + biases.unsqueeze(-1)).reshape(len(words), -1)


def _is_quantized(name: str, tensor: torch.Tensor) -> bool:
    return ".language_model." in name and tensor.ndim == 2 and tensor.shape[1] % GROUP == 0
