"""A supervisor with a gateway and several scripted models, as `roundhouse serve` runs them: `Several`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.serving.commandlines import replica_names
from deploy.supervisor import control
from deploy.supervisor.child import Child, ServedModel
from deploy.supervisor.memory import fits_beside
from deploy.supervisor.reloading import Reloading, ReloadOrder
from deploy.supervisor.restarts import RestartLimits
from deploy.supervisor.supervisor import Supervisor
from protocol import logs
from tests.system import NO_TLS, Process, eventually, free_port

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


class Several:
    """The server, at a port of its own."""

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
        self.folder = folder
        self._control = folder / "control"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)
        for model in models:
            self.make_weights(model.name, model.weight_bytes)
        told = {
            "folder": str(folder),
            "gateway": ["--port", str(port), *gateway_flags.split()],
            "models": [asdict(model) for model in models],
            "budget": budget,
            "fits": fits,
            "spare": spare,
        }
        self.process = Process("several", ["tests.faults.several", json.dumps(told)], folder)
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

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/v1/status").json()
        return answer

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
        served.http.close()
        served.process.stop()


def main(arguments: Sequence[str]) -> int:
    told = json.loads(arguments[0])
    logs.setup("serve")
    folder, env = Path(told["folder"]), dict(os.environ)
    endpoint = ["--endpoint", f"ipc://{folder}/line"]
    gateway = [sys.executable, "-m", "broker", *endpoint, *told["gateway"]]
    children = [Child("gateway", gateway, env, hears=True)]
    for model in (Scripted(**model) for model in told["models"]):
        path = str(folder / model.name)
        argv = [sys.executable, "-m", "tests.scripted_worker", *endpoint, *model.flags.split()]
        served = ServedModel(
            name=model.name,
            model=path,
            named=True,
            aliases=tuple(model.aliases),
            resident=model.resident,
            replicas=model.replicas,
        )
        argv += [f"--model={path}", f"--served-name={model.name}"]
        names = replica_names(f"worker[{model.name}]", served)
        children += [Child(name, argv, env, model=served) for name in names]
    fits = fits_beside if told["fits"] else lambda needed_bytes: False
    reloading = Reloading(folder / "control", 10.0, 30.0, fits)
    limits = RestartLimits(delay_s_max=0.4, deaths_max=CRASHES_MAX)
    return Supervisor(
        children, reloading=reloading, memory_budget=told["budget"], limits=limits, spare=told["spare"]
    ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
