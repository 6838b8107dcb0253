"""First log line of `serve`: its URL and the models that it loads."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.supervisor.memory import weight_bytes
from deploy.supervisor.models import ServedModel, first_loaded


def announcement(url: str, models: Sequence[ServedModel]) -> str:
    """Return the announcement in one line."""
    first = first_loaded(models)
    later = [model.name for model in models if model not in first]
    named = ", ".join(map(_described, first))
    return f"opening {url}/v1, loading {named}" + (f"; on demand: {', '.join(later)}" if later else "")


def _described(model: ServedModel) -> str:
    times = f"{model.replicas} workers of " if model.replicas > 1 else ""
    return f"{times}{model.name} ({_size(model)})"


def _size(model: ServedModel) -> str:
    size = weight_bytes(model.model)
    if size is None:
        return "not downloaded yet"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
