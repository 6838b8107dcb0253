"""Socket handover between gateways: clients that connect meanwhile wait and are answered."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from broker.server.server import take_over
from tests.deploy.supervisor.handover import handing_over, listening
from tests.system import START_S_MAX, STOP_S_MAX, eventually

GET = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
WAITING = 32

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listening() as made:
        yield made


@pytest.fixture
def start(listener: socket.socket, tmp_path: Path) -> Iterator[Start]:
    """Function that starts gateways with an inherited socket, killed after the test."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(handed: socket.socket = listener) -> subprocess.Popen[bytes]:
        flags = ["--port=1", f"--endpoint=ipc://{tmp_path}/line"]
        command = handing_over(handed, [sys.executable, "-m", "broker", *flags])
        with (tmp_path / "gateway.log").open("ab") as log:
            begun.append(subprocess.Popen(command, pass_fds=[handed.fileno()], stdout=log, stderr=log))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait(STOP_S_MAX)


def healthy(listener: socket.socket) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{listener.getsockname()[1]}/health", timeout=5).is_success
    return False


def answer(client: socket.socket) -> bytes:
    """Read until the connection is closed."""
    chunks = iter(lambda: client.recv(65536), b"")
    return b"".join(chunks)


def test_no_connection_is_refused_between_two_gateways(listener: socket.socket, start: Start) -> None:
    first = start()
    eventually(lambda: healthy(listener), within_s=START_S_MAX, what="the gateway answers")
    first.kill()
    first.wait(STOP_S_MAX)
    with contextlib.ExitStack() as clients:
        waiting = [
            clients.enter_context(socket.create_connection(listener.getsockname(), timeout=START_S_MAX))
            for _ in range(WAITING)
        ]
        for client in waiting:
            client.sendall(GET)
        start()
        statuses = [answer(client).split(b"\r\n")[0] for client in waiting]
    assert statuses == [b"HTTP/1.1 200 OK"] * WAITING


def test_a_socket_that_does_not_listen_is_refused_for_good(start: Start, tmp_path: Path) -> None:
    with socket.socket() as deaf:
        assert start(deaf).wait(START_S_MAX) == 78
    assert "descriptor 3 is not a listening TCP socket" in (tmp_path / "gateway.log").read_text()


def test_sockets_for_another_process_are_ignored() -> None:
    told = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "OTHER": "y"}
    assert take_over(told, os.getpid()) == []
    assert told == {"OTHER": "y"}
