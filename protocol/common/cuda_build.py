"""CUDA build of MLX: the installed package that contains its library for NVIDIA GPUs."""

from __future__ import annotations

from importlib import metadata

_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")


def cuda_package() -> str:
    """Return its name; empty: none is installed."""
    for name in _PACKAGES:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return ""
