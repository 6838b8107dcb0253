"""Leak checks of the fault tests: processes of the servers that a module's tests share are replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.system import eventually

LEAK_WAIT_S = 5.0


def _left() -> set[object]:
    """Return child processes and threads; daemon threads of libraries may stay, and each test has a timer."""
    threads = {thread for thread in threading.enumerate() if thread.is_alive() and not thread.daemon}
    timers = {thread for thread in threads if isinstance(thread, threading.Timer)}
    return {*(threads - timers), *psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module", autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Assert that child processes and non-daemon threads end with the module, instead of with each test."""
    before = _left()
    yield
    eventually(lambda: _left() <= before, within_s=LEAK_WAIT_S, what="threads and processes have ended")
