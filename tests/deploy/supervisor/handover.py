"""Socket handover to a process, as in sd_listen_fds(3)."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

# LISTEN_PID must be the process's own pid: so the process sets the variables, then executes the command.
_TAKE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.argv[2], sys.argv[2:])
"""


def handing_over(listener: socket.socket, command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` with the socket, for `Popen` with `pass_fds`."""
    return [sys.executable, "-S", "-c", _TAKE, str(listener.fileno()), *command]


def listening(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a listening socket, as a service manager would create it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener
