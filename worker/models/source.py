"""Where a model's files are: the embedded one's, in a folder, or on Hugging Face and fetched when absent."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol import hub
from protocol.modelfolder import WEIGHTS, neighbours, why_no_folder, why_no_weights
from protocol.naming import folder_of, is_folder
from protocol.wording import in_words, meant
from worker.contract import ModelError

log = logging.getLogger(__name__)

REACH = "Look at the network, set HF_ENDPOINT to a mirror, or name a folder."
"""What to do where the hub is silent."""

_MODELS = "models--"
"""Before the ids of models in the cache of Hugging Face; `/` is `--` there."""


def find_folder(model: str | None, inspect: Callable[[Path], object]) -> Path:
    """The folder with the model's files. Raises `ModelError`, or whatever `inspect` raises.

    `inspect` gets a folder that holds config.json if there is one, before the rest is fetched.
    """
    if model is None:
        from worker.pocket import MODEL_PATH

        folder = MODEL_PATH
    elif is_folder(model):
        folder = folder_of(model)
    else:
        return _fetched(model, inspect)
    if model is not None and (why := _looked(model)):
        raise ModelError(why)
    inspect(folder)
    return folder


def _looked(model: str) -> str | None:
    try:
        return why_no_folder(model)
    except OSError as error:
        return f"{in_words(error)}."


def _cached() -> list[str]:
    """The ids of the models that have been fetched."""
    from huggingface_hub import constants

    folders = neighbours(Path(constants.HF_HUB_CACHE) / "none")
    return [name[len(_MODELS) :].replace("--", "/") for name in folders if name.startswith(_MODELS)]


def weight_files(folder: Path, name: str) -> list[Path]:
    """The model's weights, all of them. Raises `ModelError` when some or all are missing."""
    files = sorted(folder.glob(WEIGHTS))
    if why := why_no_weights(folder):
        raise ModelError(f"{name}: {why}")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = _listed(index, name) - {file.name for file in files}
        if missing:
            raise ModelError(
                f"{name}: {len(missing)} of its weight files are missing from {folder} "
                f"({min(missing)} for one). Download the model again."
            )
    return files


def bytes_of(files: Sequence[Path]) -> int:
    """Their size together."""
    return sum(file.stat().st_size for file in files)


def _listed(index: Path, name: str) -> set[str]:
    try:
        return {str(file) for file in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{name}: {index} cannot be read ({error}). Download the model again.") from None


def _fetched(repository: str, inspect: Callable[[Path], object]) -> Path:
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    # A model this server cannot run should fail before its gigabytes have come.
    inspect(_snapshot(repository, ["config.json"]))
    return _snapshot(repository, DEFAULT_ALLOW_PATTERNS)


def _snapshot(repository: str, patterns: Sequence[str]) -> Path:
    """The repository's files that match, fetched with a progress bar on stderr when they are not there."""
    from huggingface_hub import constants, errors, snapshot_download

    hub.bound()
    near = meant(repository, _cached()) or "."
    unreachable = f"it is not on this machine, and {constants.ENDPOINT} cannot be reached{near} {REACH}"
    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except errors.GatedRepoError:
        reason = "its makers ask for consent first. Accept their terms on huggingface.co and set HF_TOKEN."
    except errors.RepositoryNotFoundError:
        told = "Hugging Face has no such model, or it is private (set HF_TOKEN); no folder has that name"
        reason = f"{told} either{near}"
    except errors.LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            reason = "it is not on this machine, and HF_HUB_OFFLINE forbids to fetch it."
        else:
            reason = unreachable
    except hub.transport_errors():
        reason = unreachable
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = f"it cannot be fetched from Hugging Face ({' '.join(str(error).split())})."
    raise ModelError(f"{repository}: {reason}")
