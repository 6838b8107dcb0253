"""A supervisor with a gateway and several scripted models, as `roundhouse serve` runs them: `Several`."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.serving.commandlines import replica_names
from deploy.supervisor import control
from deploy.supervisor.child import ServedModel
from deploy.supervisor.reloading import ReloadOrder
from tests.faults.serving import Server
from tests.system import eventually

STARTS_S_MAX = 60.0
CRASHES_MAX = 10**6
"""High enough for tests with many crashes."""


@dataclass(frozen=True)
class Scripted:
    """A model of the scripted engine. `flags`: of its worker. `weight_bytes`: simulated size."""

    name: str
    flags: str = "--step-ms 20"
    aliases: list[str] = field(default_factory=list)
    resident: bool = False
    weight_bytes: int = 0
    replicas: int = 1


def _workers_of(model: Scripted, folder: Path) -> tuple[list[str], list[str], dict[str, object]]:
    """Return names and command line of a model's workers, and the fields of its `ServedModel`."""
    path = str(folder / model.name)
    argv = [sys.executable, "-m", "tests.scripted_worker", "--endpoint", f"ipc://{folder}/line"]
    argv += [*model.flags.split(), f"--model={path}", f"--served-name={model.name}"]
    fields: dict[str, Any] = asdict(model)
    del fields["flags"], fields["weight_bytes"]
    fields |= {"model": path, "named": True, "aliases": tuple(model.aliases)}
    return replica_names(f"worker[{model.name}]", ServedModel(**fields)), argv, fields


class Several(Server):
    """The server of several models."""

    def __init__(
        self,
        folder: Path,
        models: Sequence[Scripted],
        *,
        budget: int | None = None,
        gateway_flags: str = "",
        fits: bool = True,
        spare: bool = False,
    ) -> None:
        super().__init__(
            folder,
            gateway_flags.split(),
            fits=fits,
            workers=[_workers_of(model, folder) for model in models],
            ready_timeout_s=30.0,
            listens=False,
            limits={"delay_s_max": 0.4, "deaths_max": CRASHES_MAX},
            budget=budget,
            spare=spare,
        )
        for model in models:
            self.make_weights(model.name, model.weight_bytes)
        self.begin()
        eventually(self.answers, within_s=STARTS_S_MAX, what="/ready")

    def answers(self) -> bool:
        """Return whether the gateway is ready."""
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/ready").status_code == 200
        return False

    def make_weights(self, name: str, size: int) -> str:
        """Create a model folder whose apparent size is `size` bytes."""
        folder = self.folder / name
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)
        return str(folder)

    def reload(self, model: str | None = None, swap_for: str | None = None) -> tuple[bool, str]:
        """Reload like `roundhouse reload`; return whether it was done, and the message."""
        return control.order(self._control, ReloadOrder(model, swap_for))

    def states(self) -> dict[str, str]:
        """Return the state of each model by name."""
        return {model["id"]: model["state"] for model in self.http.get("/v1/models").json()["data"]}

    def wait_for(self, **states: str) -> None:
        """Wait until these models have these states."""
        eventually(
            lambda: self.states().items() >= states.items(),
            within_s=STARTS_S_MAX,
            what=f"models are {states}",
        )

    def there(self) -> int | None:
        """Return the process id of the spare that has reported ready, if it is still waiting."""
        found = re.findall(r"spare is ready as pid (\d+)", self.process.log())
        return int(found[-1]) if found and int(found[-1]) in self._waiting() else None

    def _waiting(self) -> set[int]:
        """Return the supervisor's children whose command lines have no arguments."""
        serving = {worker["pid"] for worker in self.status()["workers"]}
        return {child.pid for child in self.process.stats.children()} - serving

    def pids(self, model: str) -> list[int]:
        """Return the process ids of a model's workers."""
        return [worker["pid"] for worker in self.status()["workers"] if worker["model"] == model]


@contextlib.contextmanager
def several(
    folder: Path,
    *models: Scripted,
    budget: int | None = None,
    gateway_flags: str = "",
    fits: bool = True,
    spare: bool = False,
) -> Iterator[Several]:
    """Run a server, and end it with all its children at exit."""
    served = Several(folder, models, budget=budget, gateway_flags=gateway_flags, fits=fits, spare=spare)
    try:
        yield served
    finally:
        served.close()
