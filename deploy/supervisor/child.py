"""A process that the supervisor keeps running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from deploy.supervisor.models import ServedModel

HOSTS = "--hosts="
"""What a worker is told its hostfile by."""


@dataclass(frozen=True, slots=True)
class Child:
    """`env` is its whole environment. `hears`: it is the gateway, and on the line to the supervisor. `model`:
    what it serves, where it is a worker. `fallback`: how it is run when it has been down for so long; it may
    have one of its own."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    hears: bool = False
    model: ServedModel | None = None
    fallback: Child | None = None
    fallback_after_s: float = 0.0

    @property
    def program(self) -> list[str]:
        """Its command line, up to the module that is run; empty where there is none."""
        return list(self.argv[: self.argv.index("-m") + 2]) if "-m" in self.argv else []

    @property
    def words(self) -> list[str]:
        """What that module is told."""
        return list(self.argv[len(self.program) :])

    @property
    def plans(self) -> int:
        """In how many other ways it may be run."""
        return 0 if self.fallback is None else 1 + self.fallback.plans

    @property
    def is_set(self) -> bool:
        """Whether it is a worker whose model several processes run: the first of them, which starts the
        others at ports that are theirs alone."""
        return any(word.startswith(HOSTS) for word in self.argv)

    def can_become(self, other: Child) -> bool:
        """Whether it differs from the other one in what it is told alone, and both are workers. A set has no
        use for a spare: it would wait for its other processes all the same."""
        workers = self.model is not None and other.model is not None and not self.is_set
        return workers and bool(self.program) and (self.program, self.env) == (other.program, other.env)

    def swapped(self, model: str) -> Child:
        """The same with another model under the same name."""
        assert self.model is not None
        kept = [word for word in self.argv if not word.startswith(("--model=", "--served-name="))]
        return replace(
            self,
            argv=[*kept, f"--model={model}", f"--served-name={self.model.name}"],
            model=msgspec.structs.replace(self.model, model=model),
        )
