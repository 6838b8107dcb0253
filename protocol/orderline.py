"""The line between a supervisor and the gateway under it: `orders`, as lines of JSON, down a pair of sockets.

The gateway finds the number of its end in ROUNDHOUSE_SUPERVISOR_FD.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Generic, TypeVar

import msgspec

from protocol.orders import Orders, Roster

VARIABLE = "ROUNDHOUSE_SUPERVISOR_FD"
LINE_BYTES_MAX = 2**20

Said = TypeVar("Said", Roster, Orders)


class Outlet:
    """The sending end. Never waits: who does not read gets the newest line when he reads again."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self._next = b""
        self._said: Roster | Orders | None = None

    def say(self, message: Roster | Orders) -> None:
        """Send it, unless it is what was said last."""
        if message != self._said:
            self._said = message
            self._next = msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Go on with what could not be sent at once."""
        # Where nobody is left at the other end, its end of file says so.
        with contextlib.suppress(BlockingIOError, OSError):
            while self._rest or self._next:
                if not self._rest:
                    self._rest, self._next = self._next, b""
                sent = self._line.send(self._rest, socket.MSG_DONTWAIT)
                self._rest = self._rest[sent:]


class Inlet(Generic[Said]):
    """The receiving end: bytes go in, the newest whole message comes out."""

    def __init__(self, kind: type[Said]) -> None:
        self._decoder: msgspec.json.Decoder[Said] = msgspec.json.Decoder(kind)
        self._rest = b""

    def feed(self, data: bytes) -> Said | None:
        """None: no whole line has come. Raises `ValueError` for one that is no such message."""
        *lines, self._rest = (self._rest + data).rsplit(b"\n", 1)
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError("a line is too long")
        return self._decoder.decode(lines[0].rpartition(b"\n")[2]) if lines else None
