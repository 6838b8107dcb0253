"""Folders that are so many bytes of a model, on paper."""

from __future__ import annotations

from pathlib import Path


def weights(folder: Path, *sizes: int) -> str:
    """A model's folder with weight files of these sizes."""
    folder.mkdir()
    for number, size in enumerate(sizes, 1):
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.truncate(size)
    return str(folder)
