"""Description of a model that a child serves, as the supervisor needs it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

"""Well below what requests wait for a worker that they have lost."""

PORT_OF_SETS = "hosts_port"
OF_SETS = "hosts", "split", "backend", PORT_OF_SETS
"""Settings of workers whose model is run by several processes."""

DRAFTER = "draft_model"
"""A setting that is valid only for its model, not for a fallback with another one."""

REPLICAS_MAX = 64
Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
Setting = str | int | float | bool


class ServedModel(Struct, frozen=True, kw_only=True):
    """A served model. `named`: `name` was configured, not derived from the model. `replicas`: its number of
    workers. `settings`: those of its workers only. `fallback`: plans that replace it, one after another, each
    when the one before has been down for `fallback_after` seconds: MODEL, MODEL@HOSTFILE or @HOSTFILE.
    Without a hostfile a plan is one process on this machine; without a model it is the same model."""

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
    """Return the model's fallback plans, in order."""
    words = (model.fallback,) if isinstance(model.fallback, str) else model.fallback
    settings = {name: value for name, value in model.settings.items() if name not in OF_SETS}
    return [_replacement(model, settings, *split_models(word)) for word in words]


def _replacement(
    model: ServedModel, settings: dict[str, Setting], other: str | None, hosts: str | None
) -> ServedModel:
    if hosts is not None and PORT_OF_SETS in model.settings:
        settings = settings | {PORT_OF_SETS: model.settings[PORT_OF_SETS]}
    if other is not None:  # it probably has another tokenizer
        settings = {name: value for name, value in settings.items() if name != DRAFTER}
    return replace(
        model,
        model=other or model.model,
        named=True,
        settings=settings | ({"hosts": hosts} if hosts else {}) | {"stands_in": True},
        fallback=(),
    )


def split_models(word: str) -> tuple[str | None, str | None]:
    """Split a fallback into model and hostfile. A model with an @ in its name needs a second @ behind it."""
    other, at, hosts = word.rpartition("@")
    return (other or None, hosts or None) if at else (word, None)


def first_loaded(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Return the models to load at start: the resident ones, or else the first, so that one is soon ready."""
    return [model for model in models if model.resident] or list(models[:1])
