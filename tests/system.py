"""Real processes on loopback for tests: a gateway, workers, or the whole thing under `roundhouse serve`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import httpx
import psutil

from tests.ports import free_port

START_S_MAX = 90.0
STOP_S_MAX = 30.0

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For `verify` of clients on loopback: without it each of them first reads the world's certificates."""

T = TypeVar("T")


def eventually(check: Callable[[], T], *, within_s: float, what: str = "") -> T:
    """The first true value of `check`. Raises `AssertionError` when there is none in time."""
    deadline = time.monotonic() + within_s
    while True:
        if value := check():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what or check}")
        time.sleep(0.02)


class Process:
    """One child process, its stderr in a file, ended with the test."""

    cache: ClassVar[Path | None] = None
    """Where all of them keep what was proven of models, as one user's do; None: each in its own folder."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, env: dict[str, str] | None = None):
        self.name = name
        self.log_path = folder / f"{name}.log"
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ
                | {
                    "ROUNDHOUSE_PREFIX_CACHE_DIR": str(folder / "prefixes"),
                    "XDG_CACHE_HOME": str(self.cache or folder),
                }
                | (env or {}),
            )
        self.pid = self._popen.pid
        self.stats = psutil.Process(self.pid)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, within_s: float = STOP_S_MAX) -> int:
        """The exit status (negative: a signal). Raises `subprocess.TimeoutExpired`."""
        return self._popen.wait(within_s)

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL: nothing outlives its test."""
        if self.running:
            self.kill(signal.SIGCONT)
            self.kill(signal.SIGTERM)
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
            raise AssertionError(f"{self.name} did not stop on SIGTERM:\n{self.log()[-2000:]}") from None


class System:
    """A gateway and its workers. Requests go through `http`, an httpx client at the gateway's address."""

    def __init__(
        self, folder: Path, gateway_flags: Sequence[str] = (), network: dict[str, object] | None = None
    ) -> None:
        """`network`: where images are fetched from, see `tests.gateway`; None: the gateway as it is."""
        self.folder = folder
        self.port = free_port()
        self.endpoint = f"ipc://{folder}/line"
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)
        self._flags = list(gateway_flags)
        self._network = network
        self._started = 0
        self.workers: list[Process] = []
        self.gateway = self._new_gateway()

    def restart_gateway(self, number: int = signal.SIGKILL) -> None:
        """End the gateway with a signal; start one at the same addresses."""
        self.gateway.kill(number)
        self.gateway.wait()
        self.gateway = self._new_gateway()

    def _new_gateway(self) -> Process:
        flags = ["--port", str(self.port), "--endpoint", self.endpoint, *self._flags]
        module = "broker" if self._network is None else "tests.gateway"
        env = {"TESTS_NETWORK": json.dumps(self._network)}
        gateway = Process("gateway", [module, *flags], self.folder, env)
        self.wait_for("/health")
        return gateway

    def start_worker(
        self,
        *flags: str,
        module: str = "worker.fake",
        env: dict[str, str] | None = None,
        endpoint: str | None = None,
    ) -> Process:
        """One more worker; `wait_ready` tells when it serves. `endpoint`: if not the gateway's own."""
        self._started += 1
        arguments = [module, "--endpoint", endpoint or self.endpoint, *flags]
        worker = Process(f"worker-{self._started}", arguments, self.folder, env)
        self.workers.append(worker)
        return worker

    def wait_for(self, path: str, within_s: float = START_S_MAX) -> None:
        """Until `path` answers 200."""

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.http.get(path).status_code == 200
            return False

        eventually(answers, within_s=within_s, what=f"{path} answers 200")

    def wait_ready(self) -> None:
        """Until some model serves."""
        self.wait_for("/ready")

    def wait_loaded(self, models: int) -> None:
        """Until so many do."""

        def loaded() -> bool:
            known = self.http.get("/v1/models").json()["data"]
            return sum(model["state"] == "loaded" for model in known) == models

        eventually(loaded, within_s=START_S_MAX, what=f"{models} models are loaded")

    def stop(self) -> None:
        self.http.close()
        for process in (self.gateway, *self.workers):
            process.stop()


@contextlib.contextmanager
def running_system(
    folder: Path, gateway_flags: Sequence[str] = (), network: dict[str, object] | None = None
) -> Iterator[System]:
    """A gateway and whatever workers the test starts, all gone afterwards. `network`: as for `System`."""
    system = System(folder, gateway_flags, network)
    try:
        yield system
    finally:
        system.stop()


def chat_body(text: str, **fields: object) -> dict[str, object]:
    """A one-message chat request."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def sse_documents(lines: Iterator[str]) -> Iterator[str]:
    """The data of each server-sent event, `[DONE]` included; comments are skipped."""
    for line in lines:
        if line.startswith("data: "):
            yield line[len("data: ") :]
