"""Memory that models use, estimated from their weight files and their processes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from deploy.supervisor.child import ServedModel
from protocol.common.expert_plan import ExpertPlanError, plan_experts
from protocol.common.footprint import footprint_bytes
from protocol.common.model_folder import POCKET_FOLDER, folder_of, is_folder
from protocol.settings.reader import SizeError, parse_size

MARGIN_BYTES = 2**29
"""Memory that must stay free after a second worker has been loaded beside the first one."""

EXPERTS_MEMORY = "experts_memory"
_WEIGHTS = "model*.safetensors"


def weight_bytes(model: str | None) -> int | None:
    """Return the size of a model's weight files; None if they are not found on this machine."""
    folder = local_folder(model)
    return None if folder is None else _file_bytes(folder)


def local_folder(model: str | None) -> Path | None:
    """Return the folder of a model's files; None if they are not on this machine."""
    if model is None:
        return POCKET_FOLDER
    return folder_of(model) if is_folder(model) else _snapshot(model)


def _file_bytes(folder: Path) -> int | None:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, LookupError, TypeError):  # no index: most models are a single file
        return sum(file.stat().st_size for file in folder.glob(_WEIGHTS)) or None


def weights_of(model: ServedModel) -> int | None:
    """Return the bytes that one worker holds, including its draft model and without experts that stay on
    disk; None as in `weight_bytes`."""
    own, draft = weight_bytes(model.model), model.settings.get("draft_model")
    if own is None:
        return None
    return own - _bytes_on_disk(model) + (weight_bytes(str(draft)) or 0 if draft else 0)


def _bytes_on_disk(model: ServedModel) -> int:
    """Return the bytes of the experts that its worker leaves on disk; 0 for settings that it refuses."""
    limit, folder = model.settings.get(EXPERTS_MEMORY), local_folder(model.model)
    if limit is None or folder is None:
        return 0
    try:
        plan = plan_experts(sorted(folder.glob(_WEIGHTS)), parse_size(str(limit)))
    except (ExpertPlanError, SizeError):
        return 0
    return plan.saved_bytes if plan else 0


def all_weight_bytes(model: ServedModel) -> int | None:
    """Return the bytes that all workers of the model load, each its own copy."""
    one = weights_of(model)
    return None if one is None else one * model.replicas


def _snapshot(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repository, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def fits_beside(needed_bytes: int) -> bool:
    """Return whether that many bytes and a margin are available."""
    return int(psutil.virtual_memory().available) >= needed_bytes + MARGIN_BYTES


def process_bytes(pid: int) -> int:
    """Return a process's footprint, or its resident memory. Separate GPU memory is not counted."""
    if footprint := footprint_bytes(pid):
        return footprint
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):  # it has just ended, or there can be no more descriptors
        return 0
