"""Control channel between a supervisor and its gateway: `supervisor_messages` as JSON lines on a socket pair.

The number of the gateway's descriptor is in ROUNDHOUSE_SUPERVISOR_FD.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Generic, TypeVar

import msgspec

from protocol.supervisor_messages import DesiredModels, ModelStates

VARIABLE = "ROUNDHOUSE_SUPERVISOR_FD"
LINE_BYTES_MAX = 2**20

Said = TypeVar("Said", ModelStates, DesiredModels)


class ChannelWriter:
    """Writer of JSON lines. Never blocks: a slow reader skips to the newest message."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self._next = b""
        self._said: ModelStates | DesiredModels | None = None

    def send(self, message: ModelStates | DesiredModels) -> None:
        """Send `message`, unless it equals the last one."""
        if message != self._said:
            self._said = message
            self._next = msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Continue to send what did not fit into the socket's buffer."""
        # The end of a closed peer is noticed as end of file when reading.
        with contextlib.suppress(BlockingIOError, OSError):
            while self._rest or self._next:
                if not self._rest:
                    self._rest, self._next = self._next, b""
                sent = self._line.send(self._rest, socket.MSG_DONTWAIT)
                self._rest = self._rest[sent:]


class ChannelReader(Generic[Said]):
    """Reader of JSON lines: takes bytes, returns the newest complete message."""

    def __init__(self, kind: type[Said]) -> None:
        self._decoder: msgspec.json.Decoder[Said] = msgspec.json.Decoder(kind)
        self._rest = b""

    def feed(self, data: bytes) -> Said | None:
        """Return the newest complete message, or None. Raises `ValueError` if it is invalid."""
        *lines, self._rest = (self._rest + data).rsplit(b"\n", 1)
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError("the line is too long")
        return self._decoder.decode(lines[0].rpartition(b"\n")[2]) if lines else None
