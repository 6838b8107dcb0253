"""Control socket of the supervisor, with faulty callers."""

from __future__ import annotations

import contextlib
import errno
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.supervisor import control
from deploy.supervisor.control import ORDER_BYTES_MAX, Control, ControlError, encode, order
from deploy.supervisor.reloading import ReloadOrder
from protocol import sockets

WAIT_S = 10.0


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_ORDER_S_MAX", 0.1)
    monkeypatch.setattr(control, "_CONNECT_S_MAX", 0.1)
    monkeypatch.setattr(sockets, "_CONNECT_S_MAX", 0.1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control"


@contextlib.contextmanager
def caller(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(WAIT_S)
        made.connect(str(path))
        yield made


def ends(work: Callable[[], object]) -> bool:
    """Return whether `work` returns or raises an OSError within `WAIT_S` seconds."""
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(OSError):
            work()
        over.set()

    threading.Thread(target=run, daemon=True).start()
    return over.wait(WAIT_S)


def fill(path: Path, callers: contextlib.ExitStack) -> None:
    """Connect until the socket's backlog is full."""
    with contextlib.suppress(BlockingIOError):
        while True:
            waiting = callers.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect(str(path))


@pytest.mark.parametrize("sent", [b'{"model": 1}\n', b'{"model": "\xff"}\n', b"x" * ORDER_BYTES_MAX], ids=len)
def test_an_order_that_is_not_understood_is_answered_with_the_reason(path: Path, sent: bytes) -> None:
    orders: queue.SimpleQueue[ReloadOrder] = queue.SimpleQueue()
    server = Control(path, orders.put)
    with caller(path) as other:
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: other.recv(4096), b"")).decode()
    assert answer.startswith("-this `roundhouse serve` does not understand the order: it runs another")
    assert orders.empty()
    server.answer(True, "done")
    assert order(path, ReloadOrder("a")) == (True, "done")
    assert orders.get(timeout=WAIT_S) == ReloadOrder("a")
    server.close()


def test_an_answer_that_does_not_come_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_S_MAX", 0.05)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(path))
        hung.listen(1)
        with pytest.raises(ControlError, match="no answer from `roundhouse serve`: timed out"):
            order(path)


def test_failed_accept_does_not_end_the_listener(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(control, "_ACCEPT_RETRY_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    server = Control(path, lambda asked: server.answer(True, "done"))
    assert order(path) == (True, "done")
    server.close()


def test_an_order_that_arrives_byte_by_byte_is_given_up_in_time(path: Path) -> None:
    orders: queue.SimpleQueue[ReloadOrder] = queue.SimpleQueue()
    server = Control(path, orders.put)
    with caller(path) as slow:
        until, is_over = time.monotonic() + WAIT_S, False
        while not is_over and time.monotonic() < until:
            with contextlib.suppress(BrokenPipeError):
                slow.send(b" ")
            is_over = bool(select.select((slow,), (), (), 0.01)[0])
        assert is_over
    assert orders.empty()
    server.close()


def test_a_close_ends_however_many_callers_wait(path: Path) -> None:
    orders: queue.SimpleQueue[ReloadOrder] = queue.SimpleQueue()
    server = Control(path, orders.put)
    with contextlib.ExitStack() as callers:
        first = callers.enter_context(caller(path))
        first.sendall(encode(ReloadOrder("a")))
        orders.get(timeout=WAIT_S)
        fill(path, callers)
        assert ends(server.close)
        assert first.recv(100) == b"-the server is stopping"
    assert not path.exists()
