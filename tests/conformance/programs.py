"""Programs that are run to their end and count what they did, and the server that some are run against."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.conformance.outcomes import Outcome, count_of
from tests.ports import free_port
from tests.system import NO_TLS, START_S_MAX, Process, eventually

DRIVER_S_MAX = 1800


@dataclass(frozen=True, slots=True)
class Served:
    """An address, without a slash at its end, and the name of the model there."""

    url: str
    model: str


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """`roundhouse serve` with the embedded model. Raises `AssertionError` if it does not start or stop."""
    with tempfile.TemporaryDirectory(prefix="rh-") as folder:
        port = free_port()
        url, env = f"http://127.0.0.1:{port}", {"XDG_RUNTIME_DIR": folder, "TMPDIR": folder}
        server = Process("server", ["deploy", "serve", "--port", str(port)], Path(folder), env)
        try:
            eventually(lambda: _is_ready(server, url), within_s=START_S_MAX, what=f"{url} is ready")
            models = httpx.get(f"{url}/v1/models", verify=NO_TLS).raise_for_status().json()["data"]
            yield Served(url, models[0]["id"])
        finally:
            server.stop()


def _is_ready(server: Process, url: str) -> bool:
    assert server.running, server.log()
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready", verify=NO_TLS).status_code == 200
    return False


def run(
    lane: str,
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    within_s: float = DRIVER_S_MAX,
) -> Outcome:
    """What came of a command. What it says is shown as it comes."""
    began, said = time.monotonic(), []
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
    return Outcome(lane, name, status, count_of("".join(said)), time.monotonic() - began, f"status {status}")


@contextlib.contextmanager
def _ended(program: subprocess.Popen[str], within_s: float) -> Iterator[None]:
    """It and all that it has started: when that time is over, or when the block is left."""
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
