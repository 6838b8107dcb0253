"""The gateway's listening socket for clients, which the supervisor opens and keeps for it.

So it outlives the gateway: clients that connect while there is none wait in its backlog for the next one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

BACKLOG = 2048
LISTENER_FD = "ROUNDHOUSE_LISTENER_FD"
"""The variable with the number of the inherited descriptor."""


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def inherited(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Return the supervisor's listening socket, if it passed one. Removes the variable from `environ`.

    Raises `ValueError` or `OSError` for a descriptor that is not a listening socket.
    """
    number = environ.pop(LISTENER_FD, "")
    return adopted(int(number)) if number else None


def adopted(number: int) -> socket.socket:
    """Return the listening TCP socket with this descriptor. Raises `ValueError` or `OSError`."""
    os.set_inheritable(number, False)
    listener = socket.socket(fileno=number)
    listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens or listener.family not in (socket.AF_INET, socket.AF_INET6):
        listener.close()
        raise ValueError(f"descriptor {number} is not a listening TCP socket")
    return listener
