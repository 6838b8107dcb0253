"""A spare worker process: what it prepares, how it is assigned a model, and how it ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol import channel, lifeline
from protocol.settings.worker import WorkerSettings

DEADLINE_S = 60.0
PROGRAM = """
import os, sys
from protocol import channel
from worker.process import spare

def look_ahead():
    print("looked ahead at", os.getpriority(os.PRIO_PROCESS, 0), flush=True)

document = spare.settings_document(("tests.worker.priority_probe",), look_ahead)
print(document, os.environ.get(channel.SPARE), "tests.worker.priority_probe" in sys.modules, flush=True)
"""


@dataclass
class Waiting:
    """A spare and its supervisor's ends of the channels."""

    process: subprocess.Popen[str]
    line: socket.socket
    lifeline: int

    def hear(self) -> str:
        self.line.settimeout(DEADLINE_S)
        return self.line.recv(100).decode()


@contextlib.contextmanager
def waiting(*argv: str, folder: Path) -> Iterator[Waiting]:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    env = os.environ | {
        channel.SPAWN_FD: str(theirs.fileno()),
        channel.SPARE: "1",
        lifeline.VARIABLE: str(reader),
        "XDG_CACHE_HOME": str(folder),
    }
    process = subprocess.Popen(
        [sys.executable, *argv],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=[theirs.fileno(), reader],
    )
    theirs.close()
    os.close(reader)
    try:
        with ours:
            yield Waiting(process, ours, writer)
    finally:
        with contextlib.suppress(OSError):
            os.close(writer)
        process.kill()
        process.communicate()


def test_it_imports_at_low_priority_says_that_it_is_there_and_takes_its_settings(tmp_path: Path) -> None:
    with waiting("-c", PROGRAM, folder=tmp_path) as spare:
        assert spare.hear() == "there\n"
        spare.line.sendall(channel.encode_settings(WorkerSettings(model="a")))
        assert spare.hear() == "taken\n"
        said, _ = spare.process.communicate(timeout=DEADLINE_S)
        imported, looked, document = said.splitlines()[-3:]
        assert imported == f"imported at {10 if sys.platform == 'linux' else 0}"
        assert looked == f"looked ahead at {os.nice(0)}"
        assert document == """b'{"model":"a"}\\n' None True"""


@pytest.mark.parametrize("ends", ["line", "lifeline"])
def test_it_ends_with_its_supervisor(tmp_path: Path, ends: str) -> None:
    with waiting("-c", PROGRAM, folder=tmp_path) as spare:
        assert spare.hear() == "there\n"
        if ends == "line":
            spare.line.close()
            assert spare.process.wait(DEADLINE_S) == 0
        else:
            os.close(spare.lifeline)
            assert spare.process.wait(DEADLINE_S) in (0, -15)


def test_a_real_one_checks_its_settings_when_it_is_told_them(tmp_path: Path) -> None:
    with waiting("-m", "worker", folder=tmp_path) as spare:
        assert spare.hear() == "there\n"
        spare.line.sendall(b'{"max_running": "many"}\n')
        assert spare.hear() == "taken\n"
        said, _ = spare.process.communicate(timeout=DEADLINE_S)
        assert spare.process.returncode == 78
        assert "max_running" in said
