"""One end of a socket pair between a supervisor and a process that it has started. Messages are lines."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from typing import ClassVar, Self

READ_BYTES = 65_536


class Channel:
    """End of a channel. `variable`: where a process finds the descriptor that it has inherited."""

    variable: ClassVar[str]

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    @classmethod
    def find(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Take this process's channel out of `environ`; None: there is no supervisor."""
        if not (number := environ.pop(cls.variable, "")).isdigit():
            return None
        line = socket.socket(fileno=int(number))
        line.set_inheritable(False)
        return cls(line)

    def receive(self) -> bytes:
        """Return the next bytes; none at the end. Raises `BlockingIOError` if the socket does not block."""
        try:
            return self._line.recv(READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def close(self) -> None:
        self._line.close()
