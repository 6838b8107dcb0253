"""Unique loopback ports for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.ports import LAST, RANGE_PORTS, free_port

ASK_AND_STAY = """
import sys
from tests.ports import free_port
print(free_port(), flush=True)
sys.stdin.read()
"""


def start_another(temporary: Path) -> subprocess.Popen[str]:
    words, env = [sys.executable, "-c", ASK_AND_STAY], os.environ | {"TMPDIR": str(temporary)}
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_processes_side_by_side_are_given_ports_of_different_ranges(tmp_path: Path) -> None:
    others = [start_another(tmp_path) for _ in range(2)]
    firsts = {free_port() // RANGE_PORTS, *(port_of(other) // RANGE_PORTS for other in others)}
    assert len(firsts) == 3
    assert max(firsts) * RANGE_PORTS < LAST
    for other in others:
        other.communicate()
        assert other.returncode == 0


def test_a_port_that_has_a_listener_is_passed_over() -> None:
    seen = [free_port() for _ in range(RANGE_PORTS)]
    assert len(set(seen)) > RANGE_PORTS // 2  # others may listen at some
    with socket.create_server(("127.0.0.1", seen[0])):
        assert seen[0] not in [free_port() for _ in range(RANGE_PORTS)]
