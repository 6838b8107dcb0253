"""A server whose model two processes run, for tests and measurements of what becomes of these."""

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
"""A rank that is stopped before it has come is missed so late."""


class Set:
    """A server whose model two processes run."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        mode: str = "tensor",
        ranks: int = 2,
        python: str | None = None,
        falls: bool = False,
    ) -> None:
        """`python`: the interpreter of all ranks but the first. `falls`: to the same model, alone."""
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        hosts = folder / "hosts.json"
        host = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "python": python}
        hosts.write_text(json.dumps([host] * ranks))
        told = [f"--port={self.port}", f"--endpoint=ipc://{folder}/line", f"--model={model_folder(MODEL)}"]
        told += [f"--hosts={hosts}", f"--split={mode}", f"--hosts-port={free_ports(ranks)[0]}"]
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
        """Whether the gateway has met this worker."""
        return any(worker["pid"] == pid for worker in self._workers())

    def serves_after(self, pid: int) -> bool:
        """Whether another worker than this one is ready."""
        return any(worker["pid"] != pid and worker["state"] == "ready" for worker in self._workers())

    def _workers(self) -> list[dict[str, Any]]:
        status = httpx.get(f"{self.url}/v1/status", timeout=30, verify=NO_TLS).json()
        workers: list[dict[str, Any]] = status["workers"]
        return workers

    def strays(self) -> list[psutil.Process]:
        """Ranks of ours that no set which is there has, whoever's children they have become."""
        known = {child.pid for child in self.members()} if self.process.running else set[int]()
        return [
            process
            for process in psutil.process_iter()
            if process.pid not in known and _is_rank(process, self.folder)
        ]

    def members(self) -> list[psutil.Process]:
        """The processes of the set, as far as they are there, the first rank's first."""
        found: list[tuple[bool, psutil.Process]] = []
        for child in self.process.stats.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "worker" in words and child.status() != psutil.STATUS_ZOMBIE:
                    found.append((not any(word.startswith("--hosts=") for word in words), child))
        return [child for _, child in sorted(found, key=lambda pair: pair[0])]

    def whole(self) -> list[psutil.Process]:
        """All of its processes, once they are there."""
        return eventually(
            lambda: members if len(members := self.members()) == self.ranks else None,
            within_s=READY_S_MAX,
            what=f"{self.ranks} ranks",
        )


def _is_rank(process: psutil.Process, folder: Path) -> bool:
    """Of the set whose folder this is; its environment says so."""
    with contextlib.suppress(psutil.Error, OSError):
        return "worker" in process.cmdline() and process.environ().get("XDG_CACHE_HOME") == str(folder)
    return False


@contextlib.contextmanager
def served_set(
    folder: Path,
    *flags: str,
    mode: str = "tensor",
    python: str | None = None,
    falls: bool = False,
) -> Iterator[Set]:
    """Ready; gone afterwards, with all that it has started."""
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
    """None of them is left, nor is stopped."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_S_MAX)
    assert not alive, f"left behind: {alive}"
