"""Description of a process that the supervisor keeps running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from deploy.supervisor.models import ServedModel

HOSTS = "--hosts="
"""The flag that names a worker's hostfile."""


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
