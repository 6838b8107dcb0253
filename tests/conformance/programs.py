"""Programs that print `passed/total` last, and a server for some of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.system import NO_TLS, Process, eventually

DRIVER_S_MAX = 1800
LOAD_S_MAX = 300
"""Timeout for a server to load its models on a busy machine, without cached capability checks."""

_COUNT = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program. `status`: None if it was not run. `count`: passed and all checks.
    `must_count`: the exit status alone is not sufficient. `why`: what is told of a failure."""

    name: str
    status: int | None
    count: tuple[int, int] | None = None
    why: str = ""
    must_count: bool = True

    @property
    def passed(self) -> bool:
        """Whether all checks, at least one, and the exit status passed."""
        if self.count is None:
            return self.status == 0 and not self.must_count
        return self.status == 0 and 0 < self.count[0] == self.count[1]


def count_of(said: str) -> tuple[int, int] | None:
    """Parse `passed/total` from the last line of a program's output."""
    lines = said.rstrip().splitlines()
    found = _COUNT.fullmatch(lines[-1].strip()) if lines else None
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class Served:
    """An address without a trailing slash, and the name of the model."""

    url: str
    model: str


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """Run `roundhouse serve` with the embedded model. Raises `AssertionError` if that fails."""
    with tempfile.TemporaryDirectory(prefix="rh-") as folder:
        port = free_port()
        url, env = f"http://127.0.0.1:{port}", {"XDG_RUNTIME_DIR": folder, "TMPDIR": folder}
        server = Process("server", ["deploy", "serve", "--port", str(port)], Path(folder), env)
        try:
            _wait_ready(server, url)
            models = httpx.get(f"{url}/v1/models", verify=NO_TLS).raise_for_status().json()["data"]
            yield Served(url, models[0]["id"])
        finally:
            server.stop()


@contextlib.contextmanager
def shared_cache() -> Iterator[None]:
    """Share a cache folder of model capability checks among all servers of a run.

    Without it each server repeats the checks, which take longer than most drivers.
    """
    before = Process.cache
    with tempfile.TemporaryDirectory(prefix="rh-") as folder:
        Process.cache = Path(folder)
        try:
            yield
        finally:
            Process.cache = before


def _wait_ready(server: Process, url: str) -> None:
    """Wait until the server is ready. Raises `AssertionError` with the end of its log."""
    try:
        eventually(lambda: _is_ready(server, url), within_s=LOAD_S_MAX, what=f"{url} is ready")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{server.log()[-2000:]}") from None


def _is_ready(server: Process, url: str) -> bool:
    assert server.running, server.log()
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready", verify=NO_TLS).status_code == 200
    return False


def run(
    name: str, command: Sequence[str], env: Mapping[str, str], folder: Path, within_s: float = DRIVER_S_MAX
) -> Outcome:
    said: list[str] = []
    with (
        subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as program,
        _ended(program, within_s),
    ):
        assert program.stdout is not None
        for line in program.stdout:
            print(line, end="", flush=True)
            said.append(line)
        status = program.wait()
    return Outcome(name, status, count_of("".join(said)), f"status {status}")


@contextlib.contextmanager
def _ended(program: subprocess.Popen[str], within_s: float) -> Iterator[None]:
    """End the program and its children after `within_s` seconds, or when the context ends."""
    late = threading.Timer(within_s, _kill, (program,))
    late.start()
    try:
        yield
    finally:
        late.cancel()
        _kill(program)


def _kill(program: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
