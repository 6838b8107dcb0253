"""How `roundhouse reload` speaks to `roundhouse serve`: one order in JSON and one answer, on a Unix socket.

The socket is in the runtime directory, which only its owner can enter, and is named by the gateway's port.
Orders are taken one after another, each when the one before has its answer.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from deploy.supervisor.reloading import Order
from protocol import sockets

ORDER_BYTES_MAX = 65_536
ANSWER_S_MAX = 7200.0
_ORDER_S_MAX = 5.0
_CLOSE_S_MAX = 5.0
_WAITING_MAX = 8
_DONE, _FAILED = b"+", b"-"


class ControlError(Exception):
    """The supervisor cannot be reached, or the answer has not come."""


class NobodyListensError(ControlError):
    """There is no supervisor."""


def path_for(port: int) -> Path:
    """Where the supervisor of the gateway at `port` listens. Raises `sockets.EndpointError`."""
    return sockets.runtime_directory() / f"serve-{port}"


class Control:
    """The supervisor's end. `on_order` is called, on a thread of its own, for each that must be answered."""

    def __init__(self, path: Path, on_order: Callable[[Order], None]) -> None:
        """Raises `OSError`: another supervisor listens there already, say."""
        self._path, self._on_order = path, on_order
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._closing = False
        _remove_stale(path)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(path))
            self._listener.listen(_WAITING_MAX)
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def answer(self, done: bool, text: str) -> None:
        """The answer to the order that is open."""
        self._answers.put((_DONE if done else _FAILED) + text.encode())

    def close(self) -> None:
        """Whoever still waits hears that all ends."""
        self._closing = True
        self.answer(False, "everything stops")
        # Nothing else ends an `accept` everywhere.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.connect(str(self._path))
        self._thread.join(_CLOSE_S_MAX)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closing:
            caller, _ = self._listener.accept()
            # Who hangs up before the answer has changed nothing.
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_ORDER_S_MAX)
                order = _receive(caller)
                if not self._closing and order is not None:
                    self._on_order(order)
                    caller.sendall(self._answers.get())


def encode(order: Order) -> bytes:
    """As it is sent."""
    return msgspec.json.encode(order) + b"\n"


def _receive(caller: socket.socket) -> Order | None:
    """None: he says nothing that makes sense."""
    with caller.makefile("rb") as lines, contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(lines.readline(ORDER_BYTES_MAX), type=Order)
    return None


def _remove_stale(path: Path) -> None:
    """A supervisor that was killed leaves its socket behind. Raises `OSError` when one still listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            return
    raise FileExistsError(f"another supervisor listens at {path}")


def order(path: Path, order: Order | None = None) -> tuple[bool, str]:
    """Have it carried out; none: reload what runs. Whether it was, and what is to be said of it. Raises
    `ControlError`, or `NobodyListensError`."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(ANSWER_S_MAX)
        try:
            line.connect(str(path))
            line.sendall(encode(order or Order()))
            answer = b"".join(iter(lambda: line.recv(4096), b""))
        except (FileNotFoundError, ConnectionRefusedError):
            raise NobodyListensError(f"no `roundhouse serve` listens at {path}") from None
        except OSError as error:
            raise ControlError(f"no answer from `roundhouse serve`: {error}") from error
    if not answer:
        raise ControlError("`roundhouse serve` has ended")
    return answer[:1] == _DONE, answer[1:].decode(errors="replace")
