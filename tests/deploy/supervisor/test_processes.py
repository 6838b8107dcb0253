"""Starts of processes on a machine that has no descriptors, processes or threads left."""

from __future__ import annotations

import errno
import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deploy.supervisor.child import Child, ServedModel
from deploy.supervisor.events import ChildMessage, Died, NotStarted
from deploy.supervisor.processes import Processes

WAIT_S = 60.0
SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
WORKER = Child("worker", SLEEPS, dict(os.environ), model=ServedModel(name="m"))


def descriptors() -> set[Path]:
    return set(Path("/dev/fd").iterdir())


def raise_no_descriptors(*given: Any, **named: Any) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def fail(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match at:
        case "pipe":
            monkeypatch.setattr(os, "pipe", raise_no_descriptors)
        case "socket pair":
            monkeypatch.setattr(socket, "socketpair", raise_no_descriptors)
        case "process":
            monkeypatch.setattr(subprocess, "Popen", raise_no_descriptors)
        case _:
            start = threading.Thread.start

            def start_unless(thread: threading.Thread) -> None:
                if thread.name.startswith(at):
                    raise RuntimeError("can't start new thread")
                start(thread)

            monkeypatch.setattr(threading.Thread, "start", start_unless)


@pytest.mark.parametrize("at", ["pipe", "socket pair", "process", "stderr-", "channel-", "await-"])
def test_failed_start_is_reported_and_leaves_nothing(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: queue.SimpleQueue[Died | NotStarted | ChildMessage] = queue.SimpleQueue()
    processes = Processes(events.put)
    before = descriptors()
    with monkeypatch.context() as patched:
        fail(at, patched)
        processes.start("worker", WORKER, {})
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, NotStarted)
    assert event.name == "worker"
    assert event.reason
    assert descriptors() == before
    assert processes.names() == {}
    processes.start("worker", WORKER, {})
    processes.kill("worker")
    assert isinstance(events.get(timeout=WAIT_S), Died)
    processes.end_everything(WAIT_S)
