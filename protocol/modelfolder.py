"""Whether a folder can be a model's, as far as the names of its files show.

Who starts a worker looks before it does, and the worker when it loads. Each look says what is wrong, with
what to do; None: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from protocol.naming import folder_of
from protocol.wording import meant

CONFIG = "config.json"
WEIGHTS = "model*.safetensors"
"""What upstream loads, and all it loads."""

_FOREIGN = ("*.bin", "*.gguf", "*.pth")
_INSTEAD = "take a conversion, as mlx-community on Hugging Face has them, or make one with mlx_lm.convert"


def wrong_with(model: str) -> str | None:
    """All three looks, the first that finds something. Raises `OSError` for what may not be read."""
    folder = folder_of(model)
    if why := why_no_folder(model) or why_no_config(folder):
        return why
    (folder / CONFIG).open("rb").close()
    return why_no_weights(folder)


def why_no_folder(model: str) -> str | None:
    """Of what somebody has named."""
    folder = folder_of(model)
    if folder.is_file():
        instead = f", which MLX cannot load: {_INSTEAD}" if _foreign(folder.parent, folder.name) else ""
        return f"{model} is a file{instead}. Name a model's folder, with {CONFIG} in it."
    if not folder.is_dir():
        told = f"{model}: there is no such folder. Name a model's folder or a Hugging Face id"
        return told + (meant(folder.name, neighbours(folder)) or ".")
    return None


def why_no_config(folder: Path) -> str | None:
    """Without it nobody knows what model it is."""
    if (folder / CONFIG).exists():
        return None
    if found := _foreign(folder):
        return f"there is no {CONFIG} in {folder}, only {found}, which MLX cannot load: {_INSTEAD}."
    return f"there is no {CONFIG} in {folder}; name a model's folder, or download the model again."


def why_no_weights(folder: Path) -> str | None:
    """The parts of them are counted elsewhere."""
    if any(folder.glob(WEIGHTS)):
        return None
    told = f"there are no weights ({WEIGHTS}) in {folder}"
    if found := _foreign(folder):
        return f"{told}, only {found}, which MLX cannot load: {_INSTEAD}."
    return f"{told}. Download the model again."


def neighbours(folder: Path) -> list[str]:
    """The names of the folders beside one that is not there."""
    try:
        return [each.name for each in folder.expanduser().parent.iterdir() if each.is_dir()]
    except OSError:
        return []


def _foreign(folder: Path, name: str = "*") -> str:
    """The endings of files there that are weights of other libraries'."""
    return " and ".join(sorted(set(_endings(folder, name))))


def _endings(folder: Path, name: str) -> Iterator[str]:
    for pattern in _FOREIGN:
        yield from (file.suffix for file in folder.glob(pattern) if file.match(name))
