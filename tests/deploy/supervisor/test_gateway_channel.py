"""Supervisor's channel to the gateway: what a gateway finds there when it starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from deploy.supervisor import processes
from deploy.supervisor.child import Child, ServedModel
from deploy.supervisor.supervisor import Supervisor
from protocol.channel import SUPERVISOR_FD
from protocol.supervisor_messages import ModelStates
from tests.ports import free_port

ENDS = [sys.executable, "-S", "-c", "raise SystemExit(78)"]


def test_states_of_all_models_are_there_before_the_gateway_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, found = processes._begin, []

    def look(child: Child, inherited: Mapping[str, int], stderr: int) -> subprocess.Popen[bytes]:
        if child.hears:
            with socket.socket(fileno=os.dup(inherited[SUPERVISOR_FD])) as line:
                found.append(line.recv(65_536, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return begin(child, inherited, stderr)

    monkeypatch.setattr(processes, "_begin", look)
    workers = [
        Child(f"worker[{name}]", ENDS, dict(os.environ), model=ServedModel(name=name, model=name))
        for name in ("first", "second")
    ]
    assert Supervisor([Child("gateway", ENDS, dict(os.environ), hears=True), *workers]).run() == 78
    model_states = msgspec.json.decode(found[0], type=ModelStates)
    assert [state.name for state in model_states.models] == ["first", "second"]
    assert model_states.on_demand


ORDERS_A_DOWNLOAD = f"""
import os, socket
with socket.socket(fileno=int(os.environ["{SUPERVISOR_FD}"])) as line:
    line.sendall(b'{{"pulls": [{{"id": "a", "model": "org/a"}}]}}\\n')
    said = b""
    while b"cannot be reached" not in said:
        more = line.recv(65536)
        assert more
        said += more
raise SystemExit(78)
"""


def test_download_of_the_gateway_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    gateway = Child("gateway", [sys.executable, "-S", "-c", ORDERS_A_DOWNLOAD], dict(os.environ), hears=True)
    assert Supervisor([gateway]).run() == 78
