"""Find a model's files: the embedded model, a folder, or a Hugging Face repository (downloaded if absent).
Their fingerprint identifies the model."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.common import huggingface
from protocol.common.environment import EnvironmentFault
from protocol.common.error_text import closest_match, describe_os_error
from protocol.common.model_folder import (
    POCKET,
    WEIGHTS,
    folder_of,
    is_folder,
    neighbours,
    why_no_folder,
    why_no_weights,
)
from worker.interfaces import ModelError
from worker.values import ModelInfo

log = logging.getLogger(__name__)

REACH = "Check the network, set HF_ENDPOINT to a mirror, or give a folder."
"""Advice for when the hub cannot be reached."""

SAMPLE_BYTES = 4096
"""Bytes that a fingerprint reads in the middle of each tensor."""

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d{1,5})\.safetensors")
"""Name of one file of a model in several."""
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
    """Return the model's weight files. Raises `ModelError` if some or all are missing, if files of two models
    are in the folder, or if they hold numbers that nobody can read."""
    files = sorted(folder.glob(WEIGHTS))
    why = why_no_weights(folder) or _why_incomplete(folder, {file.name for file in files}, name)
    if why := why or _why_mixed(files) or _why_unscaled(files):
        raise ModelError(f"{name}: {why}")
    return files


def _why_incomplete(folder: Path, found: set[str], name: str) -> str | None:
    index = folder / "model.safetensors.index.json"
    listed = _listed(index, name) if index.is_file() else set()
    # An index that a conversion has left behind names the files of the model that was converted.
    is_stale = not listed <= found and _is_whole(found - listed)
    missing = _gaps(found) if not listed or is_stale else listed - found
    if not missing:
        return None
    return (
        f"{len(missing)} of its weight files are missing from {folder} (for example {min(missing)}). "
        "Download the model again."
    )


def _is_whole(files: set[str]) -> bool:
    """Return whether files are whole models, by their names."""
    return bool(files) and not _gaps(files)


def _gaps(files: set[str]) -> set[str]:
    """Return the files that are missing between `…-00001-of-00004` and its last."""
    gaps: set[str] = set()
    for file in files:
        if part := _PART.fullmatch(file):
            stem, number, count = part["stem"], part["number"], part["count"]
            gaps |= {f"{stem}-{n:0{len(number)}}-of-{count}.safetensors" for n in range(1, int(count) + 1)}
    return gaps - files


def bytes_of(files: Sequence[Path]) -> int:
    """Return the total size of files."""
    return sum(file.stat().st_size for file in files)


def fingerprint(config: Path, weights: Iterable[Path], versions: Mapping[str, str]) -> str:
    """Return 32 hexadecimal digits that distinguish models whose stored caches must never be mixed up.
    `versions`: of the libraries that determine the layout of caches.

    It covers the weights, their quantization and how they are run. Tokenizer and chat template are left out,
    because stored prefixes are keyed by tokens. Weights are identified by the headers of their files and a
    sample of every tensor: reading all bytes would take as long as loading the model, and samples of a file
    would miss a fine-tune that has changed some tensors only.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(sorted(versions.items())).encode())
    digest.update(config.read_bytes())
    for file in sorted(weights):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
            digest.update(header)
            for middle in _middles(header):
                opened.seek(middle)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def lossy(facts: ModelInfo) -> dict[str, str]:
    """Return the settings that change what a model answers and what its caches contain; empty: none."""
    kv = facts.kv_quantization
    return {} if kv is None else {"kv": f"{kv.bits} {kv.group_size}"}


def _middles(header: bytes) -> list[int]:
    """Return where to read in a safetensors file with this header, in order."""
    entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
    spans = sorted((first, last) for first, last in (entry["data_offsets"] for entry in entries))
    return [8 + len(header) + max(first, (first + last - SAMPLE_BYTES) // 2) for first, last in spans]


def tensor_sizes(files: Sequence[Path]) -> list[int]:
    """Return the bytes of each tensor in safetensors files, from their headers."""
    entries = (entry for file in files for entry in _tensors(file).values())
    return [last - first for first, last in (entry["data_offsets"] for entry in entries)]


def _tensors(file: Path) -> dict[str, Any]:
    """Return the header's entries by tensor. Raises `OSError` or `ValueError`."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _why_mixed(files: Sequence[Path]) -> str | None:
    """Check that no tensor is in two files; upstream would use any of the two."""
    places: dict[str, Path] = {}
    for file in files:
        for tensor in _readable(file):
            if (other := places.setdefault(tensor, file)) != file:
                return (
                    f"both {other.name} and {file.name} in {file.parent} hold the tensor {tensor}: one is "
                    "left over from another download. Remove it."
                )
    return None


def _why_unscaled(files: Sequence[Path]) -> str | None:
    """Check that numbers in eight bits have scales."""
    tensors = {name: entry for file in files for name, entry in _readable(file).items()}
    scaled = {name.rpartition(".")[0] for name in tensors if _is_scale(name)}
    bare = [
        name
        for name, entry in tensors.items()
        if str(entry.get("dtype")).startswith("F8_")
        and not _is_scale(name)
        and name.rpartition(".")[0] not in scaled
    ]
    if not bare:
        return None
    return (
        f"{len(bare)} of its tensors are FP8 without scales (for example {bare[0]}), which MLX reads as "
        "integers. Use a conversion for MLX, or the model in bfloat16."
    )


def _is_scale(tensor: str) -> bool:
    return "scale" in tensor.rpartition(".")[2]


def _readable(file: Path) -> dict[str, Any]:
    """Return the header's entries; none of a file that upstream will refuse."""
    try:
        tensors = _tensors(file)
    except (OSError, ValueError, AttributeError, OverflowError):
        return {}
    return {name: entry for name, entry in tensors.items() if isinstance(entry, dict)}


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

    near = closest_match(repository, _cached()) or "."
    unreachable = f"it is not on this machine, and {constants.ENDPOINT} cannot be reached{near} {REACH}"
    is_local = False
    try:
        huggingface.bound()
    except EnvironmentFault as fault:
        is_local, unreachable = True, f"it is not on this machine, and cannot be downloaded: {fault}."
    try:
        folder = snapshot_download(repository, allow_patterns=list(patterns), local_files_only=is_local)
        return Path(folder)
    except errors.GatedRepoError:
        reason = "access is gated. Accept its terms on huggingface.co and set HF_TOKEN."
    except errors.RepositoryNotFoundError:
        told = "Hugging Face has no such model, or it is private (set HF_TOKEN); there is no such folder"
        reason = f"{told} either{near}"
    except errors.LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE and not is_local:
            reason = "it is not on this machine, and HF_HUB_OFFLINE forbids downloading it."
        else:
            reason = unreachable
    except huggingface.transport_errors():
        reason = unreachable
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = f"it cannot be downloaded from Hugging Face ({' '.join(str(error).split())})."
    raise ModelError(f"{repository}: {reason}")
