"""A supervisor with a gateway and a scripted worker, as `roundhouse serve` runs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from deploy.supervisor import control
from deploy.supervisor.child import Child, ServedModel
from deploy.supervisor.memory import fits_beside
from deploy.supervisor.reloading import Reloading, ReloadOrder
from deploy.supervisor.restarts import RestartLimits
from deploy.supervisor.supervisor import Supervisor
from protocol import logs
from protocol.listening import listen
from tests.system import NO_TLS, Process, eventually, free_port

KILLED_ON_PURPOSE = RestartLimits(deaths_max=10_000, delay_s_max=1.0)
# The flags are read at each start, so the next worker can have other ones.
BEGIN_WORKER = """
import os, pathlib, sys
flags = pathlib.Path(sys.argv[1]).read_text().split()
os.execv(sys.executable, [sys.executable, "-m", "tests.scripted_worker", *flags])
"""


class Server:
    """A supervisor and its processes, at a port of their own. `told`: what `main` reads of this server."""

    def __init__(self, folder: Path, gateway_flags: Sequence[str], *, fits: bool, **told: object) -> None:
        """`fits`: whether two workers fit in memory."""
        self.folder = folder
        self.endpoint = f"ipc://{folder}/line"
        self._control = folder / "control"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)
        gateway = ["broker", "--port", str(port), "--endpoint", self.endpoint, *gateway_flags]
        self._told = {
            "port": port,
            "gateway": [sys.executable, "-m", *gateway],
            "control": str(self._control),
            "fits": fits,
            **told,
        }

    def begin(self) -> None:
        """Start all processes."""
        self.process = Process("serve", ["tests.faults.serving", json.dumps(self._told)], self.folder)

    def close(self) -> None:
        """Stop the server with all its children."""
        self.http.close()
        self.process.stop()

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/v1/status").json()
        return answer


class Served(Server):
    """The server of one model."""

    def __init__(
        self,
        folder: Path,
        flags: str = "",
        *,
        fits: bool = True,
        ready_timeout_s: float = 30,
        gateway_flags: Sequence[str] = (),
    ) -> None:
        self._flags = folder / "flags"
        worker = [sys.executable, "-c", BEGIN_WORKER, str(self._flags)]
        workers = [(["worker"], worker, {"name": "fake"})]
        super().__init__(
            folder, gateway_flags, fits=fits, workers=workers, ready_timeout_s=ready_timeout_s, listens=True
        )
        self.set_worker(flags)
        self.start()

    def start(self) -> None:
        """Start all processes, and wait until a worker is ready."""
        self.begin()
        self.wait_ready()

    def wait_ready(self) -> None:
        eventually(lambda: self.workers("ready"), within_s=60, what="a worker is ready")

    def kill(self) -> None:
        """Kill all processes, as a power failure does."""
        self.process.kill(signal.SIGSTOP)  # it starts no other child meanwhile
        children = self.process.stats.children(recursive=True)
        for process in (self.process.stats, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        eventually(lambda: not any(map(is_alive, children)), within_s=30, what="all processes have ended")

    def set_worker(self, flags: str) -> None:
        """Set the flags of the next worker."""
        self._flags.write_text(f"--endpoint {self.endpoint} {flags}")

    def reload(self, *, gateway: bool = False) -> tuple[bool, str]:
        """Reload like `roundhouse reload`, or with `--gateway`; return whether the process was replaced, and
        the message."""
        return control.order(self._control, ReloadOrder(gateway=gateway))

    def gateway_pids(self) -> list[int]:
        """Return the process ids of all gateways that were started, in order."""
        return [int(pid) for pid in re.findall(r"gateway runs as pid (\d+)", self.process.log())]

    def workers(self, state: str) -> list[int]:
        """Return the process ids of the workers in this state."""
        try:
            workers = self.status()["workers"]
        except httpx.TransportError:
            return []
        return [worker["pid"] for worker in workers if worker["state"] == state]


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process still has its files; a zombie has none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextlib.contextmanager
def serving(
    folder: Path,
    flags: str = "",
    *,
    fits: bool = True,
    ready_timeout_s: float = 30,
    gateway_flags: Sequence[str] = (),
) -> Iterator[Served]:
    """Run a server, and end it with all its children at exit."""
    served = Served(folder, flags, fits=fits, ready_timeout_s=ready_timeout_s, gateway_flags=gateway_flags)
    try:
        yield served
    finally:
        served.close()


def main(arguments: Sequence[str]) -> int:
    told = json.loads(arguments[0])
    logs.setup("serve")
    env = dict(os.environ)
    children = [Child("gateway", told["gateway"], env, hears=True)]
    for names, argv, fields in told["workers"]:
        model = ServedModel(**fields | {"aliases": tuple(fields.get("aliases", ()))})
        children += [Child(name, argv, env, model=model) for name in names]
    fits = fits_beside if told["fits"] else lambda needed_bytes: False
    return Supervisor(
        children,
        reloading=Reloading(Path(told["control"]), 10.0, told["ready_timeout_s"], fits),
        limits=RestartLimits(**told["limits"]) if "limits" in told else KILLED_ON_PURPOSE,
        memory_budget=told.get("budget"),
        spare=told.get("spare", False),
        listener=listen("127.0.0.1", told["port"]) if told["listens"] else None,
    ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
