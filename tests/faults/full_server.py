"""`roundhouse serve` with gateway, worker and spare, for kills, stops and restarts on the same folder."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.ports import free_port
from tests.system import NO_TLS, Process, eventually

READY_S_MAX = 180.0
SPARE_S_MAX = 180.0
"""The spare imports at the lowest priority, which takes long on a busy machine."""
RESTART_FLAGS = ("--deaths-max=1000000", "--restart-delay-max=0.2")
"""Allow frequent crashes; all other settings are the defaults."""


class FullServer:
    """The server of one model, whose prefix cache and log are in `folder` and outlive `stop`."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._http = httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)
        self._process: Process | None = None

    def start(self) -> None:
        """Start the stopped server and wait until it is ready."""
        flags = [f"--port={self._port}", f"--endpoint=ipc://{self._folder}/line", f"--model={self._model}"]
        self._process = Process("serve", ["deploy", "serve", *flags, *RESTART_FLAGS], self._folder)
        eventually(self.worker_pids, within_s=READY_S_MAX, what="a worker is ready")

    def stop(self) -> None:
        """Stop the server by SIGTERM."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def close(self) -> None:
        """Stop the server for good."""
        self._http.close()
        self.stop()

    @property
    def _running(self) -> Process:
        assert self._process is not None, "the server is stopped"
        return self._process

    def log(self) -> str:
        return self._running.log()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._http.get("/v1/status", params={"history": "false"}).json()
        return status

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers that are ready."""
        with contextlib.suppress(httpx.TransportError):
            return [worker["pid"] for worker in self.status()["workers"] if worker["state"] == "ready"]
        return []

    def wait_ready(self) -> int:
        """Wait for a ready worker and return its process id."""
        return eventually(self.worker_pids, within_s=READY_S_MAX, what="a worker is ready")[0]

    def wait_spare(self) -> int:
        """Wait for a waiting spare and return its process id."""
        pid = eventually(self._spare_pid, within_s=SPARE_S_MAX, what="the spare waits")
        assert pid is not None
        return pid

    def _spare_pid(self) -> int | None:
        found = [int(pid) for pid in re.findall(r"spare is ready as pid (\d+)", self.log())]
        children = {child.pid for child in self._running.stats.children()}
        workers = {worker["pid"] for worker in self.status()["workers"]}
        return found[-1] if found and found[-1] in children - workers else None

    def processes(self) -> dict[str, psutil.Process]:
        """Return all processes of the server by role."""
        names = {self.wait_ready(): "worker", self.wait_spare(): "spare"}
        found = {"supervisor": self._running.stats}
        for child in self._running.stats.children(recursive=True):
            words = child.cmdline()
            name = names.get(child.pid, "gateway" if "broker" in words else f"process {child.pid}")
            found[name] = child
        return found

    def cpu_shares(self, seconds: float) -> dict[str, float]:
        """Measure the share of a core that each process uses during `seconds`."""
        processes = self.processes()
        before = {name: _cpu_s(process) for name, process in processes.items()}
        began = time.monotonic()
        time.sleep(seconds)
        elapsed_s = time.monotonic() - began
        return {name: (_cpu_s(process) - before[name]) / elapsed_s for name, process in processes.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def full_server(folder: Path, model: Path) -> Iterator[FullServer]:
    """Run a server in a new folder for the duration of the context."""
    server = FullServer(folder, model)
    try:
        server.start()
        yield server
    finally:
        server.close()
