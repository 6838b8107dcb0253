"""Models in the Hugging Face cache: listed, downloaded and removed with `huggingface_hub`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.serving.prefix_cache import free_bytes
from protocol.common import huggingface
from protocol.common.environment import EnvironmentFault
from protocol.common.error_text import closest_match

PATTERNS = (
    "*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt",
    "*.jsonl", "*.jinja",
)  # fmt: skip
"""The files that a worker loads, by the patterns of upstream's loader."""

MARGIN_BYTES = 2**30
"""Space that must stay free on the disk after a download."""
REACH_S_MAX = 10.0
"""Timeout for asking the hub whether it has a model."""


class HubError(Exception):
    """A model cannot be downloaded or removed; the message is for the user."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. `whole`: it has a config and weights that can be loaded."""

    id: str
    bytes: int
    used_at: float
    whole: bool


def folder() -> Path:
    """Return the folder of the cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def held() -> list[CachedModel]:
    """Return all cached models, sorted by id."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return []
    models = [repo for repo in found.repos if repo.repo_type == "model"]
    return sorted(
        (
            CachedModel(repo.repo_id, repo.size_on_disk, repo.last_accessed, _is_complete(repo.revisions))
            for repo in models
        ),
        key=lambda model: model.id,
    )


def _is_complete(revisions: object) -> bool:
    names = {file.file_name for revision in revisions for file in revision.files}  # type: ignore[attr-defined]
    return "config.json" in names and any(name.endswith(".safetensors") for name in names)


def missing_bytes(model: str) -> int:
    """Return the bytes still to download of a model; 0 also if that is unknown. Raises `HubError`, also if
    the disk has too little space for them."""
    from huggingface_hub import DryRunFileInfo, snapshot_download
    from huggingface_hub.errors import DryRunError

    with _readable_errors(model):
        try:
            files = snapshot_download(model, allow_patterns=list(PATTERNS), dry_run=True)
        except DryRunError:  # `pull` reports the cause
            return 0
    found = [file for file in files if isinstance(file, DryRunFileInfo)]
    needed = sum(file.file_size or 0 for file in found if file.will_download)
    if needed:
        check_room(model, needed, free_bytes(folder()))
    return needed


def check_reachable(model: str) -> None:
    """Ask the hub for a model, once. Raises `HubError` if it does not have it, or does not answer."""
    from huggingface_hub import HfApi

    with _readable_errors(model):
        HfApi().model_info(model, timeout=REACH_S_MAX)


def pull(model: str) -> Path:
    """Download the missing files of a model; continue an interrupted download. Raises `HubError`."""
    from huggingface_hub import snapshot_download

    with _readable_errors(model):
        return Path(snapshot_download(model, allow_patterns=list(PATTERNS)))


def check_room(model: str, needed: int, free: int) -> None:
    """Raise `HubError` if the disk has too little space."""
    if needed + MARGIN_BYTES > free:
        raise HubError(
            f"{model} needs {_gb(needed)} more, but {folder()} has {_gb(free)} free: remove models with"
            " `roundhouse rm`, or set HF_HUB_CACHE to a folder on another disk"
        )


def remove(models: Sequence[str]) -> int:
    """Remove all versions of these models; return the bytes freed. Raises `HubError` before any removal."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        raise HubError(f"there are no models in {folder()}") from None
    there = {repo.repo_id: repo for repo in found.repos if repo.repo_type == "model"}
    for model in models:
        if model not in there:
            raise HubError(f"{model} is not in the cache{closest_match(model, there)}")
    revisions = [revision.commit_hash for model in models for revision in there[model].revisions]
    plan = found.delete_revisions(*revisions)
    plan.execute()
    return int(plan.expected_freed_size)


@contextmanager
def _readable_errors(model: str) -> Iterator[None]:
    """Translate errors of the hub into `HubError` with a readable message."""
    from huggingface_hub import constants, errors

    unreachable = (
        f"it is not on this machine, and {constants.ENDPOINT} cannot be reached: check the network, or set"
        " HF_ENDPOINT to a mirror"
    )
    try:
        huggingface.bound()
        yield
    except errors.GatedRepoError:
        why = "access is restricted: accept the model's terms on huggingface.co and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        here = [each.id for each in held()]
        why = f"Hugging Face has no such model, or it is private (set HF_TOKEN){closest_match(model, here)}"
    except errors.LocalEntryNotFoundError:
        why = unreachable
    except huggingface.transport_errors():
        why = unreachable
    except errors.OfflineModeIsEnabled:
        why = "HF_HUB_OFFLINE forbids downloading it"
    except errors.HFValidationError:
        why = "not a valid model id: write it as OWNER/NAME"
    except (EnvironmentFault, errors.HfHubHTTPError, OSError) as error:
        advice = ": make it writable, or set HF_HUB_CACHE to another folder" * _is_of_folder(error)
        why = f"it cannot be downloaded ({' '.join(str(error).split())}){advice}"
    else:
        return
    raise HubError(f"{model}: {why}")


def _is_of_folder(error: Exception) -> bool:
    """Return whether a file of the cache cannot be written."""
    return isinstance(error, OSError) and str(error.filename or "").startswith(str(folder()))


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
