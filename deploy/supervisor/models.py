"""A model that a child serves, as far as a supervisor must know it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

"""Well below what requests wait for a worker that they have lost."""

PORT_OF_SETS = "hosts_port"
OF_SETS = "hosts", "split", "backend", PORT_OF_SETS
"""Settings of workers whose models several processes run."""

DRAFTER = "draft_model"
"""The one of a single model."""

REPLICAS_MAX = 64
Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
Setting = str | int | float | bool


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model and what clients call it. `named`: by somebody, else by the model itself. `replicas`: so many
    workers serve it. `settings`: of these alone. `fallback`: what takes its place, one after another, when it
    has been down for `fallback_after` seconds: MODEL, MODEL@HOSTFILE or @HOSTFILE; without hosts it is one
    process of this machine, without a model the same one."""

    name: str
    model: str | None = None
    named: bool = False
    aliases: tuple[str, ...] = ()
    resident: bool = False
    replicas: Replicas = 1
    fallback: str | tuple[str, ...] = ()
    fallback_after: Annotated[float, Meta(gt=0, le=86400)] | None = None
    settings: dict[str, Setting] = {}


def plans(model: ServedModel) -> list[ServedModel]:
    """What takes its place, in order."""
    words = (model.fallback,) if isinstance(model.fallback, str) else model.fallback
    settings = {name: value for name, value in model.settings.items() if name not in OF_SETS}
    return [_stand_in(model, settings, *parted(word)) for word in words]


def _stand_in(
    model: ServedModel, settings: dict[str, Setting], other: str | None, hosts: str | None
) -> ServedModel:
    if hosts is not None and PORT_OF_SETS in model.settings:
        settings = settings | {PORT_OF_SETS: model.settings[PORT_OF_SETS]}
    if other is not None:  # with another tokenizer, as likely as not
        settings = {name: value for name, value in settings.items() if name != DRAFTER}
    return replace(
        model,
        model=other or model.model,
        named=True,
        settings=settings | ({"hosts": hosts} if hosts else {}) | {"stands_in": True},
        fallback=(),
    )


def parted(word: str) -> tuple[str | None, str | None]:
    """The model and the hostfile that a fallback names. A model with an @ in its name has one behind it."""
    other, at, hosts = word.rpartition("@")
    return (other or None, hosts or None) if at else (word, None)


def first_loaded(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Those that are started with: the resident ones, or else the first, so that one is soon there."""
    return [model for model in models if model.resident] or list(models[:1])
