"""Servers for the fault tests: `several` scripted models below a supervisor, `serving` one, `full_server`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from deploy.serving.commandlines import replica_names
from deploy.supervisor import control
from deploy.supervisor.child import Child, ServedModel
from deploy.supervisor.memory import fits_beside
from deploy.supervisor.reloading import Reloading, ReloadOrder
from deploy.supervisor.restarts import RestartLimits
from deploy.supervisor.supervisor import Supervisor
from protocol.common import logs
from protocol.common.listening import listen
from tests.ports import free_port
from tests.scripted_worker.config import scripted
from tests.system import NO_TLS, Process, eventually, is_ready

READY_S_MAX = 180.0
STATES_S_MAX = 60.0
KILLED_ON_PURPOSE = RestartLimits(delay_s_max=0.4, deaths_max=10**6)
# The flags are read at each start, so the next worker can have other ones.
BEGIN_WORKER = """
import os, pathlib, sys
flags = pathlib.Path(sys.argv[1]).read_text().split()
os.execv(sys.executable, [sys.executable, "-m", "tests.scripted_worker", *flags])
"""
WorkerStart = tuple[list[str], list[str], str | None, dict[str, object]]
"""Names and command line of a model's workers, the flags that are sent to them, if any, and the fields of its
`ServedModel`."""


class Server:
    """A server at a port of its own. What is in `folder` outlives its `process`."""

    process: Process

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = f"ipc://{folder}/line"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)

    def start(self, *arguments: str) -> None:
        """Start all processes by this command line, and wait until a model is ready."""
        self.process = Process("serve", list(arguments), self.folder)
        eventually(lambda: is_ready(self.http), within_s=READY_S_MAX, what="/ready")

    def close(self) -> None:
        """Stop the server with all its children."""
        self.http.close()
        self.process.stop()

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/v1/status", params={"history": "false"}).json()
        return answer

    def workers(self, state: str) -> list[int]:
        """Return the process ids of the workers in this state."""
        with contextlib.suppress(httpx.TransportError):
            return [worker["pid"] for worker in self.status()["workers"] if worker["state"] == state]
        return []

    def wait_ready(self) -> int:
        """Wait for a ready worker, and return its process id."""
        ready = eventually(lambda: self.workers("ready"), within_s=READY_S_MAX, what="a worker is ready")
        return ready[0]

    def spare(self) -> int | None:
        """Return the process id of the spare that has reported ready, if it is still waiting."""
        found = re.findall(r"spare is ready as pid (\d+)", self.process.log())
        children = {child.pid for child in self.process.stats.children()}
        waiting = children - {worker["pid"] for worker in self.status()["workers"]}
        return int(found[-1]) if found and int(found[-1]) in waiting else None

    def wait_spare(self) -> int:
        """Wait for a waiting spare, and return its process id."""
        pid = eventually(self.spare, within_s=READY_S_MAX, what="the spare waits")
        assert pid is not None
        return pid


class FullServer(Server):
    """`roundhouse serve` of one model, with its default settings and further `flags`."""

    def __init__(self, folder: Path, model: Path, flags: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self._flags = [f"--port={self._port}", f"--endpoint={self.endpoint}", f"--model={model}", *flags]

    def begin(self) -> None:
        self.start("deploy", "serve", *self._flags, "--deaths-max=1000000", "--restart-delay-max=0.2")


# --- scripted models -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scripted:
    """A model of the scripted engine. `flags`: of its worker. `weight_bytes`: simulated size."""

    name: str
    flags: str = "--step-ms 20"
    aliases: list[str] = field(default_factory=list)
    resident: bool = False
    weight_bytes: int = 0
    replicas: int = 1


class Several(Server):
    """The server of several scripted models."""

    def __init__(
        self,
        folder: Path,
        models: Sequence[Scripted],
        *,
        budget: int | None = None,
        gateway_flags: str = "",
        spare: bool = False,
        listens: bool = False,
    ) -> None:
        """`listens`: the supervisor does, for its gateways."""
        super().__init__(folder)
        self._control = folder / "control"
        gateway = ["broker", "--port", str(self._port), "--endpoint", self.endpoint, *gateway_flags.split()]
        told = {
            "gateway": [sys.executable, "-m", *gateway],
            "workers": [self.worker(model) for model in models],
            "control": str(self._control),
            "port": self._port if listens else None,
            "budget": budget,
            "spare": spare,
        }
        self._told = json.dumps(told)
        for model in models:
            self.make_weights(model.name, model.weight_bytes)
        self.begin()

    def begin(self) -> None:
        self.start("tests.faults.several", self._told)

    def worker(self, model: Scripted) -> WorkerStart:
        path = str(self.folder / model.name)
        flags = f"--endpoint={self.endpoint} {model.flags} --model={path} --served-name={model.name}"
        fields: dict[str, Any] = asdict(model)
        del fields["flags"], fields["weight_bytes"]
        fields |= {"model": path, "named": True, "aliases": tuple(model.aliases)}
        argv = [sys.executable, "-m", "tests.scripted_worker"]
        return replica_names(f"worker[{model.name}]", ServedModel(**fields)), argv, flags, fields

    def make_weights(self, name: str, size: int) -> str:
        """Create a model folder whose apparent size is `size` bytes."""
        folder = self.folder / name
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)
        return str(folder)

    def reload(
        self, model: str | None = None, swap_for: str | None = None, *, gateway: bool = False
    ) -> tuple[bool, str]:
        """Reload like `roundhouse reload`; return whether it was done, and the message."""
        return control.order(self._control, ReloadOrder(model, swap_for, gateway))

    def states(self) -> dict[str, str]:
        """Return the state of each model by name."""
        return {model["id"]: model["state"] for model in self.http.get("/v1/models").json()["data"]}

    def wait_for(self, **states: str) -> None:
        """Wait until these models have these states."""
        eventually(
            lambda: self.states().items() >= states.items(),
            within_s=STATES_S_MAX,
            what=f"models are {states}",
        )

    def pids(self, model: str) -> list[int]:
        """Return the process ids of a model's workers."""
        return [worker["pid"] for worker in self.status()["workers"] if worker["model"] == model]

    def gateway_pids(self) -> list[int]:
        """Return the process ids of all gateways that were started, in order."""
        return [int(pid) for pid in re.findall(r"gateway runs as pid (\d+)", self.process.log())]

    def kill(self) -> None:
        """Kill all processes, as a power failure does."""
        self.process.kill(signal.SIGSTOP)  # it starts no other child meanwhile
        children = self.process.stats.children(recursive=True)
        for process in (self.process.stats, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        eventually(lambda: not any(map(_is_alive, children)), within_s=30, what="all processes have ended")


class Served(Several):
    """The server of one scripted model, `fake`, whose next worker can have other flags."""

    def __init__(self, folder: Path, flags: str = "", **options: Any) -> None:
        super().__init__(folder, [Scripted("fake", flags)], listens=True, **options)

    def worker(self, model: Scripted) -> WorkerStart:
        self.set_worker(model.flags)
        command = [sys.executable, "-c", BEGIN_WORKER, str(self.folder / "flags")]
        return ["worker"], command, None, {"name": model.name}

    def set_worker(self, flags: str) -> None:
        """Set the flags of the next worker."""
        (self.folder / "flags").write_text(f"--endpoint {self.endpoint} {flags}")


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the process still has its files; a zombie has none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextlib.contextmanager
def several(folder: Path, *models: Scripted, **options: Any) -> Iterator[Several]:
    """Run a server (options: those of `Several`), and end it with all its children at exit."""
    with contextlib.closing(Several(folder, models, **options)) as served:
        yield served


@contextlib.contextmanager
def serving(folder: Path, flags: str = "", **options: Any) -> Iterator[Served]:
    """Run a server of one model, and end it with all its children at exit."""
    with contextlib.closing(Served(folder, flags, **options)) as served:
        yield served


@contextlib.contextmanager
def full_server(folder: Path, model: Path, flags: Sequence[str] = ()) -> Iterator[FullServer]:
    """Run `roundhouse serve`, and end it with all its children at exit."""
    with contextlib.closing(FullServer(folder, model, flags)) as server:
        server.begin()
        yield server


def main(arguments: Sequence[str]) -> int:
    told = json.loads(arguments[0])
    logs.setup("serve")
    env = dict(os.environ)
    children = [Child("gateway", told["gateway"], env, hears=True)]
    for names, argv, flags, fields in told["workers"]:
        model = ServedModel(**fields | {"aliases": tuple(fields.get("aliases", ()))})
        settings = None if flags is None else scripted(flags)
        children += [Child(name, argv, env, settings, model=model) for name in names]
    return Supervisor(
        children,
        reloading=Reloading(Path(told["control"]), 10.0, 30.0, fits_beside),
        limits=KILLED_ON_PURPOSE,
        memory_budget=told["budget"],
        spare=told["spare"],
        listener=listen("127.0.0.1", told["port"]) if told["port"] else None,
    ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
