"""Models of the Hugging Face cache: what is there, fetched, removed. `huggingface_hub` does the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol import hub
from protocol.wording import meant

PATTERNS = (
    "*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt",
    "*.jsonl", "*.jinja",
)  # fmt: skip
"""The files that a worker loads, as upstream's loader names them."""

MARGIN_BYTES = 2**30
"""What must be left on the disk once a model is there."""


class HubError(Exception):
    """A model that cannot be had or removed; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Held:
    """A model in the cache. `whole`: it has weights that can be loaded."""

    id: str
    bytes: int
    used_at: float
    whole: bool


def folder() -> Path:
    """Where models are."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def held() -> list[Held]:
    """All of them, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return []
    models = [repo for repo in found.repos if repo.repo_type == "model"]
    return sorted(
        (
            Held(repo.repo_id, repo.size_on_disk, repo.last_accessed, _is_whole(repo.revisions))
            for repo in models
        ),
        key=lambda model: model.id,
    )


def _is_whole(revisions: object) -> bool:
    names = {file.file_name for revision in revisions for file in revision.files}  # type: ignore[attr-defined]
    return "config.json" in names and any(name.endswith(".safetensors") for name in names)


def missing_bytes(model: str) -> int:
    """What is still to be fetched of a model; 0, too, where nobody can say. Raises `HubError`."""
    from huggingface_hub import DryRunFileInfo, snapshot_download
    from huggingface_hub.errors import DryRunError

    with _told(model):
        try:
            files = snapshot_download(model, allow_patterns=list(PATTERNS), dry_run=True)
        except DryRunError:  # why, `pull` says
            return 0
    found = [file for file in files if isinstance(file, DryRunFileInfo)]
    return sum(file.file_size or 0 for file in found if file.will_download)


def pull(model: str) -> Path:
    """Fetch what is not there yet; what was begun goes on. Raises `HubError`."""
    from huggingface_hub import snapshot_download

    with _told(model):
        return Path(snapshot_download(model, allow_patterns=list(PATTERNS)))


def check_room(model: str, needed: int, free: int) -> None:
    """Raises `HubError` where the disk has too little."""
    if needed + MARGIN_BYTES > free:
        raise HubError(
            f"{model} needs {_gb(needed)} more, and {folder()} has {_gb(free)} left: remove models with"
            " `roundhouse rm`, or set HF_HUB_CACHE to a folder on another disk"
        )


def remove(models: Sequence[str]) -> int:
    """Forget these, all their versions. The bytes that this frees. Raises `HubError`, and then none is."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        raise HubError(f"there are no models in {folder()}") from None
    there = {repo.repo_id: repo for repo in found.repos if repo.repo_type == "model"}
    for model in models:
        if model not in there:
            raise HubError(f"{model} is not here{meant(model, there)}")
    revisions = [revision.commit_hash for model in models for revision in there[model].revisions]
    plan = found.delete_revisions(*revisions)
    plan.execute()
    return int(plan.expected_freed_size)


@contextmanager
def _told(model: str) -> Iterator[None]:
    """What goes wrong with the hub, in words."""
    from huggingface_hub import constants, errors

    hub.bound()
    unreachable = (
        f"{constants.ENDPOINT} cannot be reached, and it is not on this machine: look at the network, or set"
        " HF_ENDPOINT to a mirror"
    )
    try:
        yield
    except errors.GatedRepoError:
        why = "its makers ask for consent first: accept their terms on huggingface.co and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        here = [each.id for each in held()]
        why = f"Hugging Face has no such model, or it is private (set HF_TOKEN){meant(model, here)}"
    except errors.LocalEntryNotFoundError:
        why = unreachable
    except hub.transport_errors():
        why = unreachable
    except errors.OfflineModeIsEnabled:
        why = "HF_HUB_OFFLINE forbids to fetch it"
    except errors.HFValidationError:
        why = "that is no name of a model: it is written as OWNER/NAME"
    except (errors.HfHubHTTPError, OSError) as error:
        why = f"it cannot be fetched ({' '.join(str(error).split())})"
    else:
        return
    raise HubError(f"{model}: {why}")


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
