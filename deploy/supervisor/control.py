"""Control socket between `roundhouse reload` and `roundhouse serve`: one JSON order and one answer.

The Unix socket is in the runtime directory, which only its owner can enter, and is named by the gateway's
port. Orders are handled one after another, each when the one before is answered.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from deploy.supervisor.reloading import ReloadOrder
from protocol import sockets
from protocol.common.secure_files import create_private

log = logging.getLogger(__name__)

ORDER_BYTES_MAX = 65_536
ANSWER_S_MAX = 7200.0
_ORDER_S_MAX = 5.0
"""Timeout for receiving a whole order, and for sending its answer."""
_CONNECT_S_MAX = 1.0
"""Without this, connecting to a listener with a full backlog that accepts nothing would block for ever."""
_CLOSE_S_MAX = 5.0
_ACCEPT_RETRY_S = 1.0
_WAITING_MAX = 8
_DONE, _FAILED = b"+", b"-"
_NOT_UNDERSTOOD = (
    "this `roundhouse serve` does not understand the order: it runs another version, until it is restarted"
)


class ControlError(Exception):
    """The supervisor cannot be reached, or has not answered."""


class NoSupervisorError(ControlError):
    """There is no supervisor."""


class Control:
    """Supervisor's end of the control socket. `on_order` is called on a separate thread for each order, and
    each order must be answered."""

    def __init__(self, path: Path, on_order: Callable[[ReloadOrder], None]) -> None:
        """Raises `OSError`, for example if another supervisor already listens there."""
        self._path, self._on_order = path, on_order
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._closing = threading.Event()
        if not sockets.remove_stale(path):
            raise FileExistsError(f"another supervisor is listening at {path}")
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            with create_private():
                self._listener.bind(str(path))
            self._listener.listen(_WAITING_MAX)
            self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
            self._thread.start()
        except OSError:
            self._listener.close()
            raise
        except RuntimeError as error:  # there can be no more threads
            self._listener.close()
            path.unlink(missing_ok=True)
            raise OSError(str(error)) from error

    def answer(self, done: bool, text: str) -> None:
        """Answer the open order."""
        self._answers.put((_DONE if done else _FAILED) + text.encode())

    def close(self) -> None:
        """Close the socket, after answering the open order that the supervisor is stopping."""
        self._closing.set()
        self.answer(False, "the server is stopping")
        # Only a connection interrupts `accept` on every platform.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.settimeout(_CONNECT_S_MAX)
            knock.connect(str(self._path))
        self._thread.join(_CLOSE_S_MAX)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                caller, _ = self._listener.accept()
            except OSError as error:  # such as too many open files; later orders must find a listener
                log.warning("an order could not be received: %s", error)
                self._closing.wait(_ACCEPT_RETRY_S)
                continue
            # A client that disconnects before its answer does not affect the order.
            with caller, contextlib.suppress(OSError):
                data = _receive(caller)
                # Without a byte it is no order: it was asked whether anybody listens, or `close` knocks.
                if not self._closing.is_set() and data:
                    answer = self._answer_to(data)
                    caller.settimeout(_ORDER_S_MAX)
                    caller.sendall(answer)

    def _answer_to(self, data: bytes) -> bytes:
        try:
            order = msgspec.json.decode(data, type=ReloadOrder)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _FAILED + _NOT_UNDERSTOOD.encode()
        self._on_order(order)
        return self._answers.get()


def encode(order: ReloadOrder) -> bytes:
    """Encode an order as one line of JSON."""
    return msgspec.json.encode(order) + b"\n"


def _receive(caller: socket.socket) -> bytes:
    """Receive an order's line. Raises `OSError`, for example on a timeout."""
    until, data = time.monotonic() + _ORDER_S_MAX, b""
    while not data.endswith(b"\n") and len(data) < ORDER_BYTES_MAX:
        if (left_s := until - time.monotonic()) <= 0:
            raise TimeoutError(f"the order did not arrive within {_ORDER_S_MAX:g} s")
        caller.settimeout(left_s)
        if not (more := caller.recv(4096)):
            break
        data += more
    return data


def order(path: Path, order: ReloadOrder | None = None) -> tuple[bool, str]:
    """Send an order and return whether it succeeded, with the answer's text. None: reload all running models.

    Raises `ControlError`, or `NoSupervisorError`.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(ANSWER_S_MAX)
        try:
            line.connect(str(path))
            line.sendall(encode(order or ReloadOrder()))
            answer = b"".join(iter(lambda: line.recv(4096), b""))
        except (FileNotFoundError, ConnectionRefusedError):
            raise NoSupervisorError(f"no `roundhouse serve` is listening at {path}") from None
        except OSError as error:
            raise ControlError(f"no answer from `roundhouse serve`: {error}") from error
    if not answer:
        raise ControlError("`roundhouse serve` ended without an answer")
    return answer[:1] == _DONE, answer[1:].decode(errors="replace")
