"""What every test is held to: no thread, child process or file descriptor may outlive it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.system import System, eventually, running_system

_LEAK_WAIT_S = 5.0

# Machines are shared: how long an example took says nothing about the code. Waits have their own deadlines.
hypothesis.settings.register_profile(
    "house", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("house")


def _threads() -> set[str]:
    # Executors of libraries and MLX's own threads stay by design; ours and the test's must not.
    return {t.name for t in threading.enumerate() if t.is_alive() and not t.daemon}


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


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


@pytest.fixture
def fake_system(tmp_path: Path) -> Iterator[System]:
    """A gateway and one scripted worker, ready."""
    with running_system(tmp_path) as system:
        system.start_worker()
        system.wait_ready()
        yield system
