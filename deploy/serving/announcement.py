"""What `serve` says first: where it will be found, and what it loads."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.supervisor.memory import weight_bytes
from deploy.supervisor.models import ServedModel, first_loaded


def announcement(url: str, models: Sequence[ServedModel]) -> str:
    """In a line."""
    first = first_loaded(models)
    later = [model.name for model in models if model not in first]
    named = ", ".join(map(_described, first))
    return f"opening {url}/v1, loading {named}" + (f"; when asked for: {', '.join(later)}" if later else "")


def _described(model: ServedModel) -> str:
    times = f"{model.replicas} workers of " if model.replicas > 1 else ""
    return f"{times}{model.name} ({_size(model)})"


def _size(model: ServedModel) -> str:
    size = weight_bytes(model.model)
    if size is None:
        return "not on this machine yet"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
