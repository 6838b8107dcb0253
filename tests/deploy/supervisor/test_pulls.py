"""Downloads by the supervisor: from a local hub, cancelled, and without a network."""

from __future__ import annotations

import errno
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from deploy.supervisor.pulls import Pulls
from protocol.supervisor_messages import PULLS_MAX, Pull, PullState
from tests.deploy.machine.hub_played import SHA, hub_that_has

WAIT_S = 60.0
MODEL = "org/small-4bit"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "tokenizer.json": b"{}"}
HANGS = (
    sys.executable,
    "-S",
    "-c",
    'import time; print(\'{"done": 1, "total": 4}\', flush=True); time.sleep(600)',
)


@pytest.fixture
def line() -> Iterator[int]:
    reader, writer = os.pipe()
    yield reader
    os.close(reader)
    os.close(writer)


class Downloads:
    """`Pulls`, with a wait for a change."""

    def __init__(self, *command: str) -> None:
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        changed = lambda: self._changes.put(None)  # noqa: E731
        self.pulls = Pulls(changed, command) if command else Pulls(changed)

    def until(self, stage: str) -> PullState:
        while True:
            [state] = self.pulls.states()
            if state.stage == stage and (stage != "running" or state.done_bytes):
                return state
            self._changes.get(timeout=WAIT_S)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with hub_that_has({MODEL: FILES}) as (url, requests):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield requests


def test_a_model_is_downloaded_with_its_progress(hub: list[str], tmp_path: Path, line: int) -> None:
    downloads = Downloads()
    downloads.pulls.order([Pull(id="a", model=MODEL)], line)
    done = downloads.until("done")
    assert done.done_bytes == done.total_bytes == sum(map(len, FILES.values()))
    snapshot = tmp_path / "hub" / "models--org--small-4bit" / "snapshots" / SHA
    assert {path.name for path in snapshot.iterdir()} == FILES.keys()
    downloads.pulls.order([], line)
    assert downloads.pulls.states() == []


def test_downloads_are_bounded_and_end_with_their_order_or_the_supervisor(line: int) -> None:
    downloads = Downloads(*HANGS)
    order = [Pull(id="a", model=MODEL)]
    downloads.pulls.order(order, line)
    assert downloads.until("running").total_bytes == 4
    downloads.pulls.order([], line)
    assert downloads.pulls.states() == []
    downloads.pulls.order([Pull(id=str(number), model=MODEL) for number in range(PULLS_MAX + 2)], line)
    assert len(downloads.pulls.states()) == PULLS_MAX
    downloads.pulls.close()
    assert downloads.pulls.states() == []


def test_download_that_cannot_start_is_reported_once(monkeypatch: pytest.MonkeyPatch, line: int) -> None:
    changes: list[None] = []
    pulls = Pulls(lambda: changes.append(None), HANGS)
    order = [Pull(id="a", model=MODEL)]
    with monkeypatch.context() as patched:
        error = OSError(errno.EAGAIN, "Resource temporarily unavailable")
        patched.setattr(subprocess, "Popen", mock.Mock(side_effect=error))
        pulls.order(order, line)
    pulls.order(order, line)
    [state] = pulls.states()
    assert state.stage == "failed"
    assert state.failure.startswith(f"{MODEL}: the download could not be started: ")
    assert "Errno" not in state.failure
    assert len(changes) == 1
    pulls.order([], line)
    assert pulls.states() == []
