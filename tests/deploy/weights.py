"""Model folders with sparse weight files of given sizes."""

from __future__ import annotations

from pathlib import Path


def weights(folder: Path, *sizes: int) -> str:
    """Create a model folder with weight files of these sizes in bytes, and return its path."""
    folder.mkdir()
    for number, size in enumerate(sizes, 1):
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.truncate(size)
    return str(folder)
