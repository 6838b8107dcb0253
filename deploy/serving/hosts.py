"""Whether the hostfiles that `serve` is told of can be used, said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from deploy.serving.settings import ServeSettings
from deploy.supervisor.models import ServedModel, plans
from protocol.hosts import Backend, HostsError, read, wrong_with

_OF_ONE = ("hosts", "fallback")
"""What is said for the one model that there is."""


def with_fallback(model: ServedModel, given: ServeSettings) -> ServedModel:
    """With what `serve` is told to do when it does not come back."""
    told: dict[str, Any] = {}
    if given.fallback:
        told["fallback"] = given.fallback
    if given.fallback_after_s is not None:
        told["fallback_after"] = given.fallback_after_s
    return replace(model, **told)


def wrong_hosts(given: ServeSettings, served: Sequence[ServedModel]) -> list[str]:
    """A line for each that is wrong."""
    told = [name for name in _OF_ONE if getattr(given, name)]
    if told and len(served) > 1:
        return [f"{name}: of several models, say it of one, under [models.NAME]" for name in told]
    sets = [model for model in served if given.hosts or "hosts" in model.settings]
    twice = [model.name for model in sets if model.replicas > 1]
    if twice:
        return [f"hosts: {', '.join(twice)}: replicas would be at the same ports; a set is one worker"]
    return [line for path, backend in _named(given, served) if (line := _wrong(path, backend))]


def _named(given: ServeSettings, served: Sequence[ServedModel]) -> Iterator[tuple[Path, Backend | None]]:
    """Each hostfile, and the backend that is asked for."""
    for model in served:
        path = model.settings.get("hosts", given.hosts)
        backend = model.settings.get("backend", given.backend)
        for plan in plans(model):
            if "hosts" in plan.settings:
                yield Path(str(plan.settings["hosts"])).expanduser(), None
        if path is not None:
            yield Path(str(path)).expanduser(), cast("Backend | None", backend)


def _wrong(path: Path, backend: Backend | None) -> str | None:
    try:
        hosts = read(path)
    except HostsError as error:
        return f"hosts: {error}"
    wrong = wrong_with(hosts, backend or hosts.backend or "ring")
    return f"hosts: {path}: {wrong}" if wrong else None
