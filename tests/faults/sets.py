"""A server with one model over several ranks, for tests and measurements of rank failures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.models.fixtures import model_folder
from tests.ports import free_port, free_ports
from tests.system import NO_TLS, Process, eventually

MODEL = "dense"
READY_S_MAX = 120.0
GONE_S_MAX = 60.0
JOIN_S_MAX = 20.0
"""Timeout for a rank that is stopped before it joins."""


class Set:
    """A server with one model over several ranks."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        mode: str = "tensor",
        ranks: int = 2,
        python: str | None = None,
        falls: bool = False,
    ) -> None:
        """`python`: interpreter of all ranks but the first. `falls`: with a fallback to one process."""
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        hosts = folder / "hosts.json"
        host = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "python": python}
        hosts.write_text(json.dumps([host] * ranks))
        first = free_ports(ranks)[0]
        self.ring = range(first, first + ranks)
        """Ports of upstream's ring."""
        told = [f"--port={self.port}", f"--endpoint=ipc://{folder}/line", f"--model={model_folder(MODEL)}"]
        told += [f"--hosts={hosts}", f"--split={mode}", f"--hosts-port={first}"]
        told += ["--deaths-max=1000", "--restart-delay-max=0.2", *flags]
        told += [f"--fallback={model_folder(MODEL)}"] if falls else []
        environ = {"ROUNDHOUSE_JOIN_TIMEOUT": str(JOIN_S_MAX)}
        self.ranks = ranks
        self.process = Process("serve", ["deploy", "serve", *told], folder, environ)

    def wait_ready(self) -> None:
        eventually(self.is_ready, within_s=READY_S_MAX, what="ready")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5, verify=NO_TLS).status_code == 200
        except httpx.TransportError:
            return False

    def knows(self, pid: int) -> bool:
        """Return whether this worker has connected to the gateway."""
        return any(worker["pid"] == pid for worker in self._workers())

    def serves_after(self, pid: int) -> bool:
        """Return whether a worker with another process id is ready."""
        return any(worker["pid"] != pid and worker["state"] == "ready" for worker in self._workers())

    def _workers(self) -> list[dict[str, Any]]:
        status = httpx.get(f"{self.url}/v1/status", timeout=30, verify=NO_TLS).json()
        workers: list[dict[str, Any]] = status["workers"]
        return workers

    def strays(self) -> list[psutil.Process]:
        """Return rank processes of this server outside the current set, whatever their parent is."""
        known = {child.pid for child in self.members()} if self.process.running else set[int]()
        return [
            process
            for process in psutil.process_iter()
            if process.pid not in known and _is_rank(process, self.folder)
        ]

    def members(self) -> list[psutil.Process]:
        """Return the existing processes of the set, with the first rank first."""
        found: list[tuple[bool, psutil.Process]] = []
        for child in self.process.stats.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if _is_worker(child, words) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append((child.ppid() != self.process.pid, child))
        return [child for _, child in sorted(found, key=lambda pair: pair[0])]

    def whole(self) -> list[psutil.Process]:
        """Wait until all processes of the set exist, and return them."""
        return eventually(
            lambda: members if len(members := self.members()) == self.ranks else [],
            within_s=READY_S_MAX,
            what=f"{self.ranks} ranks",
        )


def _is_worker(process: psutil.Process, words: list[str]) -> bool:
    """Return whether this command line is a worker's own.

    Until a new process executes its command, it has the command line of its parent.
    """
    parent = process.parent()
    return "worker" in words and (parent is None or parent.cmdline() != words)


def _is_rank(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process is a rank of the set in `folder`, according to its environment."""
    with contextlib.suppress(psutil.Error, OSError):
        if _is_worker(process, process.cmdline()):
            return process.environ().get("XDG_CACHE_HOME") == str(folder)
    return False


@contextlib.contextmanager
def served_set(
    folder: Path, *flags: str, mode: str = "tensor", python: str | None = None, falls: bool = False
) -> Iterator[Set]:
    """Run a ready server, and end it with all its processes at exit."""
    served = Set(folder, *flags, mode=mode, python=python, falls=falls)
    members: list[psutil.Process] = []
    try:
        served.wait_ready()
        yield served
        members = served.members() if served.process.running else []
    finally:
        served.process.stop()
    assert_gone(members)
    eventually(lambda: not served.strays(), within_s=GONE_S_MAX, what="no rank is left")


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """Assert that none of the processes exists any more, not even stopped."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_S_MAX)
    assert not alive, f"leaked: {alive}"
