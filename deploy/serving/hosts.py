"""Validation of hostfiles and fallbacks before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from deploy.serving.settings import GATEWAY, ServeSettings
from deploy.supervisor.models import ServedModel, plans
from protocol.hosts import Backend, HostsError, problem_with, read

FALLBACK_AFTER_S = 60.0
_OF_ONE = ("hosts", "fallback")
"""Flags that apply only if there is a single model."""


def with_fallback(model: ServedModel, given: ServeSettings) -> ServedModel:
    """Return the model with the fallback settings of `serve`."""
    told: dict[str, Any] = {}
    if given.fallback:
        told["fallback"] = given.fallback
    if given.fallback_after_s is not None:
        told["fallback_after"] = given.fallback_after_s
    return replace(model, **told)


def wrong_hosts(given: ServeSettings, served: Sequence[ServedModel]) -> list[str]:
    """Return one line for each error."""
    told = [name for name in _OF_ONE if getattr(given, name)]
    if told and len(served) > 1:
        return [f"{name}: with several models, set it for one, under [models.NAME]" for name in told]
    sets = [model for model in served if given.hosts or "hosts" in model.settings]
    twice = [model.name for model in sets if model.replicas > 1]
    if twice:
        return [f"hosts: {', '.join(twice)}: remove replicas, they would use the same ports on the hosts"]
    late = [line for model in served if (line := _too_late(given, model))]
    return late + [line for path, backend in _named(given, served) if (line := _wrong(path, backend))]


def fallback_after_s(given: ServeSettings, model: ServedModel) -> float:
    """Return how long a plan may be down before the next takes over: as configured, or such that streams
    survive until the last plan."""
    each = (given.failover_timeout_s or GATEWAY.failover_timeout_s) / (1 + len(plans(model)))
    return model.fallback_after or min(FALLBACK_AFTER_S, each)


def _too_late(given: ServeSettings, model: ServedModel) -> str | None:
    """Return an error if streams would time out before the last plan takes over."""
    count, within = len(plans(model)), given.failover_timeout_s or GATEWAY.failover_timeout_s
    last = count * fallback_after_s(given, model)
    if last < within:
        return None
    return (
        f"fallback: {model.name}: the last of {count} takes over after {last:g} s, but streams wait for"
        f" {within:g} s: set a shorter --fallback-after or a longer --failover-timeout"
    )


def _named(given: ServeSettings, served: Sequence[ServedModel]) -> Iterator[tuple[Path, Backend | None]]:
    """Yield each hostfile with its configured backend."""
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
    wrong = problem_with(hosts, backend or hosts.backend or "ring")
    return f"hosts: {path}: {wrong}" if wrong else None
