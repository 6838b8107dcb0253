"""Peer processes: the pid known to the system, compared with the pid in the peer's Hello."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.transport.router import LEFT_ALONE, kill_peer, peer_pid
from protocol.messages import Hello
from tests.broker.transport.test_router import LinkEvents, listening
from tests.ports import free_port

WAIT_S = 20.0

# Connects to argv[1] under the name argv[2], sends a Hello with the pid argv[3], or its own pid for 0, and
# stays connected.
PEER = """
import os, sys, threading, zmq
from protocol import sockets, wire
from protocol.messages import Hello

endpoint, name, pid = sys.argv[1:]
line = sockets.connect_dealer(zmq.Context(), endpoint, name, None)
hello = Hello(incarnation=name, version=1, model="m", pid=int(pid) or os.getpid())
line.send_multipart(wire.encode(hello))
threading.Event().wait()
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/line"


@pytest.fixture
def start() -> Iterator[Start]:
    """Function that starts processes, which are killed after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(code: str, *arguments: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)]))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.wait(WAIT_S)


async def met(touch: LinkEvents) -> Hello:
    """Return the next peer's Hello."""
    news = await touch.next()
    assert isinstance(news, tuple)
    assert isinstance(news[1], Hello)
    return news[1]


async def test_peer_is_killed_by_its_own_pid_and_no_process_by_that_of_another(
    endpoint: str, start: Start
) -> None:
    async with listening(endpoint) as (link, touch):
        honest = start(PEER, endpoint, "honest", 0)
        assert (await met(touch)).pid == honest.pid
        liar = start(PEER, endpoint, "liar", honest.pid)
        assert (await met(touch)).pid == honest.pid
        assert link.end("liar", honest.pid) == link.end("nobody", honest.pid) == LEFT_ALONE
        for process in (honest, liar):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        honest.send_signal(signal.SIGSTOP)  # simulates a hang
        assert link.end("honest", honest.pid) == "killed"
        assert await asyncio.to_thread(honest.wait, WAIT_S) == -signal.SIGKILL
        assert await touch.next() == "honest"
        assert liar.poll() is None
        liar.kill()
        assert await touch.next() == "liar"
        assert link.end("liar", liar.pid) == LEFT_ALONE


async def test_hung_tcp_peer_is_disconnected_and_not_killed(start: Start) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with listening(endpoint) as (link, touch):
        hung, other = start(PEER, endpoint, "hung", 0), start(PEER, endpoint, "other", 0)
        assert {(await met(touch)).pid, (await met(touch)).pid} == {hung.pid, other.pid}
        hung.send_signal(signal.SIGSTOP)
        assert link.end("hung", hung.pid) == "disconnected"
        assert await touch.next() == "hung", "the hung peer is not the one that was lost"
        assert hung.poll() is None
        assert other.poll() is None
        assert touch.silent


def test_the_other_end_of_a_unix_socket_has_a_process_and_of_others_none() -> None:
    with contextlib.ExitStack() as stack:
        one, other = socket.socketpair()
        tcp = socket.create_server(("127.0.0.1", 0))
        for opened in (one, other, tcp):
            stack.enter_context(opened)
        assert peer_pid(one.fileno()) == os.getpid()
        assert peer_pid(tcp.fileno()) is None
        gone = one.fileno()
    assert peer_pid(gone) is None
    assert peer_pid(-1) is None


def test_a_gateway_does_not_kill_itself_nor_a_group_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(WAIT_S)
    killed: list[int] = []
    kill = os.kill
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(pid))
    for pid in (os.getpid(), 1, 0, -1):
        monkeypatch.setattr("broker.transport.router.peer_pid", lambda descriptor, pid=pid: pid)
        assert not kill_peer([0], pid)
    assert killed == []
    monkeypatch.setattr("os.kill", kill)
    monkeypatch.setattr("broker.transport.router.peer_pid", lambda descriptor: gone.pid)
    assert not kill_peer([0], gone.pid), "a process that is gone already is no error"
