"""Find a model's files: the embedded model, a folder, or a Hugging Face repository (downloaded if absent)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol import huggingface
from protocol.error_text import closest_match, describe_os_error
from protocol.model_folder import (
    POCKET,
    WEIGHTS,
    folder_of,
    is_folder,
    neighbours,
    why_no_folder,
    why_no_weights,
)
from worker.contract.engine import ModelError

log = logging.getLogger(__name__)

REACH = "Check the network, set HF_ENDPOINT to a mirror, or give a folder."
"""Advice for when the hub cannot be reached."""

_MODELS = "models--"
"""Prefix of model folders in the Hugging Face cache; `/` of an id becomes `--`."""


def find_folder(model: str | None, inspect: Callable[[Path], object]) -> Path:
    """Return the folder with the model's files. Raises `ModelError`, or whatever `inspect` raises.

    `inspect`: called with a folder that has config.json, if there is one, before the rest is downloaded.
    """
    model = POCKET if model is None else model
    if not is_folder(model):
        return _fetched(model, inspect)
    folder = folder_of(model)
    if why := _looked(model):
        raise ModelError(why)
    inspect(folder)
    return folder


def _looked(model: str) -> str | None:
    try:
        return why_no_folder(model)
    except OSError as error:
        return f"{describe_os_error(error)}."


def _cached() -> list[str]:
    """Return the ids of downloaded models."""
    from huggingface_hub import constants

    folders = neighbours(Path(constants.HF_HUB_CACHE) / "none")
    return [name[len(_MODELS) :].replace("--", "/") for name in folders if name.startswith(_MODELS)]


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the model's weight files. Raises `ModelError` if some or all are missing."""
    files = sorted(folder.glob(WEIGHTS))
    if why := why_no_weights(folder):
        raise ModelError(f"{name}: {why}")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = _listed(index, name) - {file.name for file in files}
        if missing:
            raise ModelError(
                f"{name}: {len(missing)} of its weight files are missing from {folder} "
                f"(for example {min(missing)}). Download the model again."
            )
    return files


def bytes_of(files: Sequence[Path]) -> int:
    """Return the total size of files."""
    return sum(file.stat().st_size for file in files)


def tensor_sizes(files: Sequence[Path]) -> list[int]:
    """Return the bytes of each tensor in safetensors files, from their headers."""
    sizes: list[int] = []
    for file in files:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        entries = (entry for name, entry in header.items() if name != "__metadata__")
        sizes += [last - first for first, last in (entry["data_offsets"] for entry in entries)]
    return sizes


def _listed(index: Path, name: str) -> set[str]:
    try:
        return {str(file) for file in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{name}: {index} cannot be read ({error}). Download the model again.") from None


def _fetched(repository: str, inspect: Callable[[Path], object]) -> Path:
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    # A model that this server cannot run should fail before its weights are downloaded.
    inspect(_snapshot(repository, ["config.json"]))
    return _snapshot(repository, DEFAULT_ALLOW_PATTERNS)


def _snapshot(repository: str, patterns: Sequence[str]) -> Path:
    """Return the repository's folder; download missing files that match, with a progress bar on stderr."""
    from huggingface_hub import constants, errors, snapshot_download

    huggingface.bound()
    near = closest_match(repository, _cached()) or "."
    unreachable = f"it is not on this machine, and {constants.ENDPOINT} cannot be reached{near} {REACH}"
    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except errors.GatedRepoError:
        reason = "access is gated. Accept its terms on huggingface.co and set HF_TOKEN."
    except errors.RepositoryNotFoundError:
        told = "Hugging Face has no such model, or it is private (set HF_TOKEN); there is no such folder"
        reason = f"{told} either{near}"
    except errors.LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            reason = "it is not on this machine, and HF_HUB_OFFLINE forbids downloading it."
        else:
            reason = unreachable
    except huggingface.transport_errors():
        reason = unreachable
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = f"it cannot be downloaded from Hugging Face ({' '.join(str(error).split())})."
    raise ModelError(f"{repository}: {reason}")
