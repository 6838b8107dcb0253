"""Names and folders of models, and checks of a folder, by file names only.

The checks run before a worker is started, and again when it loads. Each returns an error message that says
what to do, or None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.common.error_text import closest_match

CONFIG = "config.json"
WEIGHTS = "model*.safetensors"
"""The weight files that upstream loads; it loads no others."""

_FOREIGN = ("*.bin", "*.gguf", "*.pth", "*.npz")
_INSTEAD = "use a conversion, for example from mlx-community on Hugging Face, or make one with mlx_lm.convert"

POCKET = "pocket"
"""Name of the embedded model, wherever a model is named. A folder of this name is `./pocket`."""
POCKET_FOLDER = Path(__file__).resolve().parents[2] / "worker" / "pocket" / "model"
_SNAPSHOT = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[0-9a-f]{40}$")
"""Folder of a repository's files in the Hugging Face cache; `/` of the id becomes `--`."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def name_of(model: str | None) -> str:
    """Return a model's default name: a repository's id, or a folder's name. None: the embedded model.

    A link is called by its own name, whatever it leads to. A snapshot in the Hugging Face cache, also behind
    links, is called by the id of its repository.
    """
    if model is None or model == POCKET:
        return POCKET
    if not is_folder(model):
        return model
    folder = folder_of(model)
    real = folder.resolve()
    if snapshot := _SNAPSHOT.search(str(folder)) or _SNAPSHOT.search(str(real)):
        return snapshot[1].replace("--", "/", 1)
    return folder.name if folder.name not in ("", "..") else real.name


def original_name(model: str | None) -> str:
    """Return the name of the model behind all links, which may tell what it is made for."""
    is_link = model is not None and model != POCKET and is_folder(model)
    return name_of(str(folder_of(model).resolve()) if model is not None and is_link else model)


def folder_of(model: str) -> Path:
    """Return `model` as a path, whether or not it exists."""
    return POCKET_FOLDER if model == POCKET else expand_user(Path(model))


def expand_user(path: Path) -> Path:
    """Return the path with the home in place of a leading `~`; unchanged if there is no such home."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def is_folder(model: str) -> bool:
    """Return whether `model` is a folder; otherwise it is a Hugging Face id."""
    return folder_of(model).exists() or _REPOSITORY.fullmatch(model) is None


def problem_with(model: str) -> str | None:
    """Return the first error of all three checks. Raises `OSError` if the config is not readable."""
    folder = folder_of(model)
    if why := why_no_folder(model) or why_no_config(folder):
        return why
    (folder / CONFIG).open("rb").close()
    return why_no_weights(folder)


def why_no_folder(model: str) -> str | None:
    """Check that `model` is a folder."""
    folder = folder_of(model)
    if folder.is_file():
        instead = f", which MLX cannot load: {_INSTEAD}" if _foreign(folder.parent, folder.name) else ""
        return f"{model} is a file{instead}. Give a model folder that contains {CONFIG}."
    if not folder.is_dir():
        problem = f"{model}: no such folder. Give a model folder or a Hugging Face id"
        return problem + (closest_match(folder.name, neighbours(folder)) or ".")
    return None


def why_no_config(folder: Path) -> str | None:
    """Check that the folder contains `config.json`."""
    if (folder / CONFIG).exists():
        return None
    if snapshots := sorted(folder.glob(f"snapshots/*/{CONFIG}")):
        return f"{folder} is a cache of downloads; give {snapshots[-1].parent}."
    if found := _foreign(folder):
        return f"{folder} contains no {CONFIG}, only {found}, which MLX cannot load: {_INSTEAD}."
    return f"{folder} contains no {CONFIG}; give a model folder, or download the model again."


def why_no_weights(folder: Path) -> str | None:
    """Check that the folder contains weights. Missing shards are found elsewhere."""
    if any(folder.glob(WEIGHTS)):
        return None
    problem = f"{folder} contains no weights ({WEIGHTS})"
    if found := _foreign(folder):
        return f"{problem}, only {found}, which MLX cannot load: {_INSTEAD}."
    return f"{problem}. Download the model again."


def read_optional(file: Path) -> dict[str, Any]:
    """Return a JSON object of a model folder; empty if there is none that can be read."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def neighbours(folder: Path) -> list[str]:
    """Return the names of the folders in the parent of `folder`."""
    try:
        return [each.name for each in expand_user(folder).parent.iterdir() if each.is_dir()]
    except OSError:
        return []


def _foreign(folder: Path, name: str = "*") -> str:
    """Return the suffixes of files in `folder` that are other libraries' weights."""
    return " and ".join(sorted(set(_endings(folder, name))))


def _endings(folder: Path, name: str) -> Iterator[str]:
    for pattern in _FOREIGN:
        yield from (file.suffix for file in folder.glob(pattern) if file.match(name))
