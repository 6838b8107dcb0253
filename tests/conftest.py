"""What every test is held to: no thread, child process or file descriptor may outlive it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.broker.page import scripts
from tests.browser import chromium
from tests.system import Process, System, eventually, running_system

_LEAK_WAIT_S = 5.0

# Machines are shared: how long an example took says nothing about the code. Waits have their own deadlines.
hypothesis.settings.register_profile(
    "house", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("house")


PROCESSES_MAX = 6
"""Beyond that, tests of real processes would keep each other waiting."""

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of a container, in microseconds of a core in each so many: it may be less than the cores that it sees."""

_WAITING = ("faults", "e2e", "deploy")
"""Folders of tests that mostly wait for processes, those with long ones first."""
_COMPUTING = ("worker", "models")
"""Folders of tests that take seconds of a core; no other ones do."""


def pytest_configure() -> None:
    """Where a shell started us in the background, interrupts are ignored, which what we start inherits."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one more than the cores that we may use, since much of the time somebody waits."""
    return min(_cores() + 1, PROCESSES_MAX)


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _QUOTA.read_text().partition(" ") if _QUOTA.exists() else ("max", "", "")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait and files that compute by turns, in both the long ones first: so the cores are busy,
    and what comes last is short."""
    root = Path(__file__).parent
    ranks = {folder: rank for rank, folder in enumerate((*_WAITING, *_COMPUTING))}
    folders = {item.path: item.path.relative_to(root).parts[0] for item in items}
    files = sorted(folders, key=lambda path: ranks.get(folders[path], len(ranks)))
    waiting = [path for path in files if folders[path] in _WAITING]
    computing = [path for path in files if folders[path] not in _WAITING]
    places = {
        path: (number + 0.5) / len(kind) for kind in (waiting, computing) for number, path in enumerate(kind)
    }
    items.sort(key=lambda item: places[item.path])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out, since nothing was there to open it with: in a line, and never silently."""
    if chromium.find() is None:
        left = "" if scripts.runnable() else " and its scripts (no node either)"
        terminalreporter.write_line(f"Not opened: the page at / in a browser{left}: `make browser`")


def _threads() -> set[str]:
    # Executors of libraries and MLX's own threads stay by design; ours and the test's must not.
    return {t.name for t in threading.enumerate() if t.is_alive() and not t.daemon}


def _children() -> set[int]:
    # To look through all processes of the machine takes milliseconds, before and after each of thousands of
    # tests, and most have none at all.
    if _is_childless():
        return set()
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _is_childless() -> bool:
    """Whether the system says so at once; macOS has no such call before Python 3.13."""
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Children and non-daemon threads started by a test have ended when it has."""
    threads, children = _threads(), _children()
    yield
    eventually(
        lambda: _threads() <= threads and _children() <= children,
        within_s=_LEAK_WAIT_S,
        what="threads and child processes of the test have ended",
    )


@pytest.fixture(scope="session", autouse=True)
def proofs_are_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a worker has proven of a model is known to those that are started after it, in this run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    Process.cache = shared / "cache"
    Process.cache.mkdir(exist_ok=True)


@pytest.fixture
def fake_system(tmp_path: Path) -> Iterator[System]:
    """A gateway and one scripted worker, ready."""
    with running_system(tmp_path) as system:
        system.start_worker()
        system.wait_ready()
        yield system
