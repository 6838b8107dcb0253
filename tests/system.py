"""Real processes on loopback for tests: a gateway and workers, or `roundhouse serve`."""

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

START_S_MAX = 180.0
STOP_S_MAX = 60.0
"""Bounds of waits that end with the event, on machines that others load."""
POLL_S_MIN, POLL_S_MAX = 0.02, 0.2
"""Pause between two looks: short at first, so that a short wait stays short, and then a tenth of the wait."""
STABLE_LOOKS = 10
"""Consecutive equal readings after which a changing value counts as stable."""

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For `verify` of clients on loopback: avoids loading the CA certificates for each client."""

T = TypeVar("T")


def eventually(check: Callable[[], T], *, within_s: float, what: str = "") -> T:
    """Poll `check` until it returns a true value, and return that. Raises `AssertionError` on timeout."""
    began = time.monotonic()
    while True:
        if value := check():
            return value
        waited_s = time.monotonic() - began
        if waited_s > within_s:
            raise AssertionError(f"not within {within_s} s: {what or check}")
        time.sleep(min(POLL_S_MAX, max(POLL_S_MIN, waited_s / 10)))


def stable(
    look: Callable[[], T], *, within_s: float, what: str, accept: Callable[[T], bool] = lambda _: True
) -> T:
    """Poll `look` until `accept` holds and the value was equal `STABLE_LOOKS` times in a row; return it.

    For counts of processes, threads and descriptors, which keep changing briefly after an operation. Raises
    `AssertionError` with the last value on timeout.
    """
    deadline, last, looks = time.monotonic() + within_s, look(), 1
    while looks < STABLE_LOOKS or not accept(last):
        if time.monotonic() > deadline:
            raise AssertionError(f"not stable within {within_s} s: {what}; the last value: {last}")
        time.sleep(0.02)
        now = look()
        last, looks = now, looks + 1 if now == last else 1
    return last


class Process:
    """A child process that logs to a file and is stopped with the test."""

    cache: ClassVar[Path | None] = None
    """The shared cache of model capability checks, as for one user; None: a cache for each test folder."""

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
                    "ROUNDHOUSE_JOURNAL_MAX": "64M",
                    "ROUNDHOUSE_JOURNAL_DIR": str(folder / "durable"),
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
        """Wait for the exit status (negative: a signal). Raises `subprocess.TimeoutExpired`."""
        return self._popen.wait(within_s)

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if that is ignored, so that the process does not outlive its test."""
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
    """A gateway and its workers. `http` is an httpx client of the gateway."""

    def __init__(
        self, folder: Path, gateway_flags: Sequence[str] = (), network: dict[str, object] | None = None
    ) -> None:
        """`network`: the hosts that images are fetched from (`tests.gateway`); None: the real gateway."""
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
        """End the gateway with a signal and start another at the same addresses."""
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
        module: str = "tests.scripted_worker",
        env: dict[str, str] | None = None,
        endpoint: str | None = None,
    ) -> Process:
        """Start another worker; `wait_ready` waits until it serves. `endpoint`: default is the gateway's."""
        self._started += 1
        arguments = [module, "--endpoint", endpoint or self.endpoint, *flags]
        worker = Process(f"worker-{self._started}", arguments, self.folder, env)
        self.workers.append(worker)
        return worker

    def start_ready_worker(self, *flags: str, module: str = "tests.scripted_worker") -> Process:
        """Start a worker, and wait until a model is ready."""
        worker = self.start_worker(*flags, module=module)
        self.wait_ready()
        return worker

    def wait_for(self, path: str, within_s: float = START_S_MAX) -> None:
        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.http.get(path).status_code == 200
            return False

        eventually(answers, within_s=within_s, what=f"{path} answers 200")

    def wait_ready(self) -> None:
        self.wait_for("/ready")

    def wait_loaded(self, models: int, within_s: float = START_S_MAX) -> None:
        """Wait until `models` models are loaded."""

        def loaded() -> bool:
            known = self.http.get("/v1/models").json()["data"]
            return sum(model["state"] == "loaded" for model in known) == models

        eventually(loaded, within_s=within_s, what=f"{models} models are loaded")

    def stop(self) -> None:
        self.http.close()
        for process in (self.gateway, *self.workers):
            process.stop()


@contextlib.contextmanager
def running_system(
    folder: Path, gateway_flags: Sequence[str] = (), network: dict[str, object] | None = None
) -> Iterator[System]:
    """Run a gateway, and stop it and the test's workers at exit. `network`: as for `System`."""
    system = System(folder, gateway_flags, network)
    try:
        yield system
    finally:
        system.stop()


def is_ready(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return http.get("/ready").status_code == 200
    return False


def chat_body(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def sse_documents(lines: Iterator[str]) -> Iterator[str]:
    """Yield the data of each server-sent event, including `[DONE]`; skip comments."""
    for line in lines:
        if line.startswith("data: "):
            yield line[len("data: ") :]
