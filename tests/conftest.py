"""Fixtures and hooks of all tests: test order, leak checks, and a scripted system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Set
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests import device
from tests.broker.page import scripts
from tests.browser import chromium
from tests.oracle import Oracle
from tests.system import Process, System, eventually, running_system

_LEAK_WAIT_S = 30.0

# No deadline per example: on shared machines its duration says nothing. Waits have their own timeouts.
hypothesis.settings.register_profile(
    "search", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
# The same examples in every run, so that what fails is due to a change. `make soak` searches for others.
hypothesis.settings.register_profile("house", hypothesis.settings.get_profile("search"), derandomize=True)
hypothesis.settings.load_profile("house")


PROCESSES_MAX = 6
"""With more processes, tests of real processes would slow each other down."""

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""CPU quota and period of a container, in microseconds; the quota may be below the visible cores."""

_WAITING = ("faults", "e2e", "deploy")
"""Folders of tests that mostly wait for processes, those with the longest tests first."""
_COMPUTING = ("worker", "models")
"""Folders of tests that compute for seconds; no other tests do."""


_BUFFERS_BYTES_MAX = 2**25
"""Size of MLX's cache of buffers between tests; it is also its default on CPUs."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def pytest_configure() -> None:
    """Restore SIGINT, which a shell ignores for background jobs; child processes would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: twice the usable cores, because many tests wait."""
    return min(2 * _cores(), PROCESSES_MAX)


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _QUOTA.read_text().partition(" ") if _QUOTA.exists() else ("max", "", "")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the device cannot do, and interleave test files that wait with files that compute, the
    long ones of both first. This keeps the cores busy, and the last tests are short."""
    items[:], lacking = device.split(items)
    config.hook.pytest_deselected(items=lacking)
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


@pytest.fixture(scope="session", autouse=True)
def _no_folders_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide API keys that the user has created, which every `serve` would require, and write nothing to the
    user's state folder, where gateways at one port share journal and batches."""
    # A short path, because it may contain sockets.
    with tempfile.TemporaryDirectory(prefix="rh-") as state, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_STATE_HOME", state)
        patch.setenv("ROUNDHOUSE_JOURNAL_MAX", "0")  # tests of the journal set it
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report which tests of the page were left out because no browser or node was found."""
    if chromium.find() is None:
        terminalreporter.write_line(
            "Not opened in a browser: the page at / and those of other origins: `make browser`"
        )
    if not scripts.runnable():
        terminalreporter.write_line("Not run: the scripts of the page at / (node is not installed)")


def _threads() -> set[str]:
    # Daemon threads of MLX and of libraries' executors may stay; threads of the code and of tests must not.
    return {t.name for t in threading.enumerate() if t.is_alive() and not t.daemon}


def _children(shared: Set[int] = frozenset()) -> set[int]:
    """Return the child processes of all levels, without what `shared` ones have started: a browser replaces
    its processes as it likes."""
    # Listing all processes takes milliseconds, before and after each of thousands of tests, most of which
    # have no children.
    if _is_childless():
        return set()
    found: set[int] = set()
    of_shared = set(shared)
    for child in psutil.Process().children(recursive=True):  # parents first
        with contextlib.suppress(psutil.NoSuchProcess):
            (of_shared if child.ppid() in of_shared else found).add(child.pid)
    return found


def _is_childless() -> bool:
    """Ask the kernel cheaply whether there are children; macOS has no such call before Python 3.13."""
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Assert that a test's child processes and non-daemon threads end with it."""
    threads, children = _threads(), _children()
    yield
    eventually(
        lambda: _threads() <= threads and _children(children) <= children,
        within_s=_LEAK_WAIT_S,
        what="threads and child processes of the test have ended",
    )


@pytest.fixture(autouse=True)
def _small_buffer_cache() -> Iterator[None]:
    """Limit MLX's cache of buffers, which each loaded model sets to a share of the machine's memory: several
    test processes would fill them all."""
    yield
    if (mx := sys.modules.get("mlx.core")) is not None:
        mx.set_cache_limit(_BUFFERS_BYTES_MAX)
        if mx.get_cache_memory() > _BUFFERS_BYTES_MAX:
            mx.clear_cache()


@pytest.fixture(scope="module", autouse=True)
def _freed_pages() -> Iterator[None]:
    """Return the free pages of the heap to the system, which glibc keeps between large allocations."""
    yield
    if _trim is not None and "mlx.core" in sys.modules:
        _trim(0)


@pytest.fixture(scope="session", autouse=True)
def proofs_are_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share the cache of model capability checks among all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    Process.cache = shared / "cache"
    Process.cache.mkdir(exist_ok=True)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as oracle:
        yield oracle


@pytest.fixture
def fake_system(tmp_path: Path) -> Iterator[System]:
    """Yield a gateway with one scripted worker that is ready."""
    with running_system(tmp_path) as system:
        system.start_worker()
        system.wait_ready()
        yield system
