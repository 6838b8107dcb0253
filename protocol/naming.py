"""Default names of models."""

from __future__ import annotations

import re
from pathlib import Path

POCKET = "pocket"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def name_of(model: str | None) -> str:
    """Return a model's default name: a repository's id or a folder's name. None: the embedded model."""
    if model is None:
        return POCKET
    return folder_of(model).resolve().name if is_folder(model) else model


def folder_of(model: str) -> Path:
    """Return `model` as a path, whether or not it exists."""
    return Path(model).expanduser()


def is_folder(model: str) -> bool:
    """Return whether `model` is a folder; otherwise it is a Hugging Face id."""
    return folder_of(model).exists() or _REPOSITORY.fullmatch(model) is None
