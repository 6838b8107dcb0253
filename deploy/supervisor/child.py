"""Description of a process that the supervisor keeps running, and of the model that it serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

PORT_OF_SETS = "hosts_port"
OF_SETS = "hosts", "split", "backend", PORT_OF_SETS
"""Settings of workers whose model is run by several processes."""

OF_MODEL = "draft_model", "adapters"
"""Settings that are valid only for their model, not for a fallback with another one."""

ADAPTERS = "adapters"

REPLICAS_MAX = 64
Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]


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
    settings: dict[str, Any] = {}


def plans(model: ServedModel) -> list[ServedModel]:
    """Return the model's fallback plans, in order."""
    words = (model.fallback,) if isinstance(model.fallback, str) else model.fallback
    settings = {name: value for name, value in model.settings.items() if name not in OF_SETS}
    return [_replacement(model, settings, *split_models(word)) for word in words]


def _replacement(
    model: ServedModel, settings: dict[str, Any], other: str | None, hosts: str | None
) -> ServedModel:
    if hosts is not None and PORT_OF_SETS in model.settings:
        settings = settings | {PORT_OF_SETS: model.settings[PORT_OF_SETS]}
    if other is not None:  # it probably has another tokenizer
        settings = {name: value for name, value in settings.items() if name not in OF_MODEL}
    if hosts is not None:  # several ranks serve no adapters
        settings = {name: value for name, value in settings.items() if name != ADAPTERS}
    return msgspec.structs.replace(
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


@dataclass(frozen=True, slots=True)
class Child:
    """A supervised process. `env`: its whole environment. `settings`: those that are sent to it, so that its
    command line needs no arguments; None: it finds them itself. `hears`: it is the gateway, and has a channel
    to the supervisor. `model`: the model that a worker serves. `is_set`: it is rank 0 of a model that several
    processes run; it starts the other ranks, on ports reserved for them. `fallback`: how the process is run
    once it has been down for `fallback_after_s` seconds; a fallback may have a fallback of its own."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    settings: Struct | None = None
    hears: bool = False
    model: ServedModel | None = None
    is_set: bool = False
    fallback: Child | None = None
    fallback_after_s: float = 0.0

    @property
    def plans(self) -> int:
        """The number of fallbacks behind this plan."""
        return 0 if self.fallback is None else 1 + self.fallback.plans

    def can_become(self, other: Child) -> bool:
        """Whether both are workers that differ only in their settings, so that a spare can become `other`.
        A set of ranks gains nothing from a spare: it would still wait for its other processes."""
        workers = self.model is not None and other.model is not None and not self.is_set
        return workers and self.settings is not None and (self.argv, self.env) == (other.argv, other.env)

    def named(self, name: str) -> Child:
        """Return this child, and its fallbacks, under another name."""
        return replace(self, name=name, fallback=self.fallback and self.fallback.named(name))

    def swapped(self, model: str) -> Child:
        """Return this child with another model under the same name."""
        assert self.model is not None
        own = {"model": model, "served_name": self.model.name}
        settings = self.settings and msgspec.structs.replace(self.settings, **own)
        return replace(self, settings=settings, model=msgspec.structs.replace(self.model, model=model))
