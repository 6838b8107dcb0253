"""What a model is called by those who have not given it a name."""

from __future__ import annotations

import re
from pathlib import Path

POCKET = "pocket"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def name_of(model: str | None) -> str:
    """How clients call it: a repository by its id, a folder by its last part. None: the embedded model."""
    if model is None:
        return POCKET
    return folder_of(model).resolve().name if is_folder(model) else model


def folder_of(model: str) -> Path:
    """The folder that is named, whether or not it is there."""
    return Path(model).expanduser()


def is_folder(model: str) -> bool:
    """Whether it means a folder; else it is a Hugging Face id."""
    return folder_of(model).exists() or _REPOSITORY.fullmatch(model) is None
