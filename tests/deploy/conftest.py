"""Fixtures that start supervisors in separate processes, with small scripts as children."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.deploy.supervisor.process_output import Begin, ProcessOutput, Supervise

ROOT = Path(__file__).resolve().parents[2]

SUPERVISOR = """
import json, os, signal, sys
from deploy.supervisor.child import Child
from deploy.supervisor.restarts import RestartLimits
from deploy.supervisor.supervisor import Supervisor
from protocol.common import logs

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
logs.setup("serve")
os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # must not reach any child
told = json.loads(sys.argv[1])
children = [Child(name, argv, dict(os.environ)) for name, argv in told["children"]]
limits = RestartLimits(**told["limits"])
sys.exit(Supervisor(children, stop_timeout_s=told["stop_timeout_s"], limits=limits).run())
"""


def config(folder: Path, text: str) -> str:
    """Write a settings file, and return its path."""
    file = folder / "roundhouse.toml"
    file.write_text(text)
    return str(file)


@pytest.fixture
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runtime folder for sockets, without the user's ROUNDHOUSE_ variables."""
    for name in [name for name in os.environ if name.startswith("ROUNDHOUSE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "roundhouse"


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Function that starts processes, which are killed with all their children after the test."""
    begun: list[ProcessOutput] = []

    def start(argv: Sequence[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> ProcessOutput:
        begun.append(ProcessOutput(argv, cwd, {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}))
        return begun[-1]

    yield start
    for told in begun:
        told.end()


@pytest.fixture
def supervise(begin: Begin) -> Supervise:
    """Function that starts a supervisor. Its children are given in order as name=script or name=[argv]."""

    def start(
        *, stop_timeout_s: float = 10.0, limits: dict[str, float] | None = None, **programs: str | list[str]
    ) -> ProcessOutput:
        children = [
            [name, [sys.executable, "-c", program] if isinstance(program, str) else program]
            for name, program in programs.items()
        ]
        told = {"children": children, "stop_timeout_s": stop_timeout_s, "limits": limits or {}}
        return begin([sys.executable, "-c", SUPERVISOR, json.dumps(told)])

    return start
