"""Servers for a measurement: started on loopback, waited for, stopped, and asked what they cost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

START_S_MAX = 180.0
STOP_S_MAX = 20.0


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    silent: bool = False,
    log: Path | None = None,
    python: str = sys.executable,
) -> Iterator[psutil.Process]:
    """`python -m module arguments…`, with `environ` over our own variables, while the context is open; its
    children end with it. `silent`: what it says is thrown away; `log`: or kept in a file."""
    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open("ab")) if log else subprocess.DEVNULL if silent else None
        process = subprocess.Popen(
            [python, "-m", module, *arguments],
            env={**os.environ, **(environ or {})},
            stdout=output,
            stderr=output,
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked first, then made to; and what it leaves behind."""
    children = tree(psutil.Process(process.pid))[1:] if process.poll() is None else []
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _kill(children)


def kill_tree(process: psutil.Process) -> None:
    """SIGKILL to a process and all that it has started; nothing where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        _kill(tree(process))


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A short-lived folder for ipc sockets."""
    with tempfile.TemporaryDirectory(prefix="rh-") as folder:
        yield Path(folder)


def wait_for(url: str, process: psutil.Process | None = None) -> None:
    """Until `url` answers 200. Raises `TimeoutError`, or `ChildProcessError` when `process` has ended."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        if process is not None and process.status() == psutil.STATUS_ZOMBIE:
            raise ChildProcessError(f"the server of {url} has ended")
        return False

    wait_until(answers, f"{url} did not answer 200")


def kill_worker(url: str, after_s: float) -> None:
    """SIGKILL to the worker of our gateway at `url`, so many seconds from now; back when another one serves.

    Raises `TimeoutError`, or `ProcessLookupError` when there is no worker to kill.
    """
    killed = serving_worker(url)
    if killed is None:
        raise ProcessLookupError(f"no worker serves {url}")
    time.sleep(after_s)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: serving_worker(url) not in (None, killed), f"no other worker served {url}")


def serving_worker(url: str) -> int | None:
    """The process id of the worker of our gateway at `url` that is ready; None where none is."""
    with urllib.request.urlopen(f"{url}/v1/status", timeout=START_S_MAX) as answer:
        workers = json.load(answer)["workers"]
    return next((int(worker["pid"]) for worker in workers if worker["state"] == "ready"), None)


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    """Raises `TimeoutError`, which says `otherwise`."""
    deadline = time.monotonic() + START_S_MAX
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} within {START_S_MAX} s")
        time.sleep(0.05)


def tree(process: psutil.Process) -> list[psutil.Process]:
    """The process, then its children and theirs. Raises `psutil.NoSuchProcess`."""
    return [process, *process.children(recursive=True)]


def tree_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children that still run. Raises `psutil.NoSuchProcess`."""
    return sum(cpu_s(each) for each in tree(process))


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds a process has used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)
