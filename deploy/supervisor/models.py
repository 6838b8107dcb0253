"""A model that a child serves, as far as a supervisor must know it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

FALLBACK_AFTER_S = 60.0
"""Well below what requests wait for a worker that they have lost."""

OF_SETS = "hosts", "split", "backend", "hosts_port"
"""Settings of workers whose models several processes run."""

REPLICAS_MAX = 64
Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
Setting = str | int | float | bool


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model and what clients call it. `named`: by somebody, else by the model itself. `replicas`: so many
    workers serve it. `settings`: of these alone. `fallback`: another model, and `fallback_hosts` a hostfile,
    that take its place when it has been down for `fallback_after` seconds; without hosts it is one process of
    this machine."""

    name: str
    model: str | None = None
    named: bool = False
    aliases: tuple[str, ...] = ()
    resident: bool = False
    replicas: Replicas = 1
    fallback: str | None = None
    fallback_hosts: str | None = None
    fallback_after: Annotated[float, Meta(gt=0, le=86400)] = FALLBACK_AFTER_S
    settings: dict[str, Setting] = {}


def plan_b(model: ServedModel) -> ServedModel | None:
    """What takes its place; None: nothing does."""
    if model.fallback is None and model.fallback_hosts is None:
        return None
    settings = {name: value for name, value in model.settings.items() if name not in OF_SETS}
    hosts = {"hosts": model.fallback_hosts} if model.fallback_hosts else {}
    return replace(
        model,
        model=model.model if model.fallback is None else model.fallback,
        named=True,
        settings=settings | hosts | {"stands_in": True},
        fallback=None,
        fallback_hosts=None,
    )


def first_loaded(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Those that are started with: the resident ones, or else the first, so that one is soon there."""
    return [model for model in models if model.resident] or list(models[:1])
