"""Server processes of a benchmark: start on loopback, wait until ready, stop, and measure CPU time."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
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


@contextlib.contextmanager
def running(
    module: str, arguments: Sequence[str], environ: Mapping[str, str], log: Path, python: str = sys.executable
) -> Iterator[psutil.Process]:
    """Run `python -m module arguments…` with `environ` added to our own variables, while the context is open;
    its children end with it. Its output is appended to `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [python, "-m", module, *arguments],
            env={**os.environ, "XDG_STATE_HOME": _state_home(), **environ},
            stdout=output,
            stderr=output,
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        _end(process)


@functools.cache
def _state_home() -> str:
    """Return a folder for what a server keeps between its starts, which is deleted when this process ends."""
    folder = tempfile.mkdtemp(prefix="rh-state-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the process, by SIGKILL after a timeout, and kill its remaining children."""
    children = tree(psutil.Process(process.pid))[1:] if process.poll() is None else []
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _kill(children)


def kill_tree(process: psutil.Process) -> None:
    """Kill a process and all its descendants with SIGKILL; do nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        _kill(tree(process))


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_for(url: str, process: psutil.Process) -> None:
    """Wait until `url` answers 200. Raises `TimeoutError`, or `ChildProcessError` if `process` has ended."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        if process.status() == psutil.STATUS_ZOMBIE:
            raise ChildProcessError(f"the server of {url} has ended")
        return False

    wait_until(answers, f"{url} did not answer 200")


def kill_worker(url: str, after_s: float) -> None:
    """Kill the worker of our gateway at `url` with SIGKILL after `after_s` seconds, and wait for the next
    worker.

    Raises `TimeoutError`, or `ProcessLookupError` if there is no worker to kill.
    """
    killed = serving_worker(url)
    if killed is None:
        raise ProcessLookupError(f"no worker serves {url}")
    time.sleep(after_s)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: serving_worker(url) not in (None, killed), f"no other worker served {url}")


def serving_worker(url: str) -> int | None:
    """Return the process id of the ready worker of our gateway at `url`, or None."""
    with urllib.request.urlopen(f"{url}/v1/status", timeout=START_S_MAX) as answer:
        workers = json.load(answer)["workers"]
    return next((int(worker["pid"]) for worker in workers if worker["state"] == "ready"), None)


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until `holds` returns True. Raises `TimeoutError` with the message `otherwise`."""
    deadline = time.monotonic() + START_S_MAX
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} within {START_S_MAX} s")
        time.sleep(0.05)


def tree(process: psutil.Process) -> list[psutil.Process]:
    """Return the process and all its descendants. Raises `psutil.NoSuchProcess`."""
    return [process, *process.children(recursive=True)]


def tree_cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its running descendants. Raises `psutil.NoSuchProcess`."""
    return sum(cpu_s(each) for each in tree(process))


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def cpu_s_since(before_s: float, process: psutil.Process) -> float:
    """Return the CPU seconds used since `before_s`, and at least one tick of that clock."""
    return max(cpu_s(process) - before_s, 1 / os.sysconf("SC_CLK_TCK"))
