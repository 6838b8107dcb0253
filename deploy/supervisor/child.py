"""Description of a process that the supervisor keeps running, and of the model that it serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

HOSTS = "--hosts="
"""The flag that names a worker's hostfile."""

ENDPOINT = "--endpoint="
"""The flag that names the gateway's endpoint for workers."""

PORT_OF_SETS = "hosts_port"
OF_SETS = "hosts", "split", "backend", PORT_OF_SETS
"""Settings of workers whose model is run by several processes."""

OF_MODEL = "draft_model", "adapters"
"""Settings that are valid only for their model, not for a fallback with another one."""

ADAPTERS = "adapters"

REPLICAS_MAX = 64
Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
Setting = str | int | float | bool | tuple[str, ...]


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
    """A supervised process. `env`: its whole environment. `hears`: it is the gateway, and has a channel to
    the supervisor. `model`: the model that a worker serves. `fallback`: how the process is run once it has
    been down for `fallback_after_s` seconds; a fallback may have a fallback of its own."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    hears: bool = False
    model: ServedModel | None = None
    fallback: Child | None = None
    fallback_after_s: float = 0.0

    @property
    def program(self) -> list[str]:
        """The command line up to the module that is run; empty if it runs no module."""
        return list(self.argv[: self.argv.index("-m") + 2]) if "-m" in self.argv else []

    @property
    def words(self) -> list[str]:
        """The arguments of that module."""
        return list(self.argv[len(self.program) :])

    @property
    def endpoint(self) -> str:
        """Where gateway and workers meet."""
        return next((word for word in reversed(self.argv) if word.startswith(ENDPOINT)), "")[len(ENDPOINT) :]

    @property
    def plans(self) -> int:
        """The number of fallbacks behind this plan."""
        return 0 if self.fallback is None else 1 + self.fallback.plans

    @property
    def is_set(self) -> bool:
        """Whether it is rank 0 of a model that several processes run. It starts the other ranks, on ports
        reserved for them."""
        return any(word.startswith(HOSTS) for word in self.argv)

    def can_become(self, other: Child) -> bool:
        """Whether both are workers that differ only in their arguments, so that a spare can become `other`.
        A set of ranks gains nothing from a spare: it would still wait for its other processes."""
        workers = self.model is not None and other.model is not None and not self.is_set
        return workers and bool(self.program) and (self.program, self.env) == (other.program, other.env)

    def swapped(self, model: str) -> Child:
        """Return this child with another model under the same name."""
        assert self.model is not None
        kept = [word for word in self.argv if not word.startswith(("--model=", "--served-name="))]
        return replace(
            self,
            argv=[*kept, f"--model={model}", f"--served-name={self.model.name}"],
            model=msgspec.structs.replace(self.model, model=model),
        )
