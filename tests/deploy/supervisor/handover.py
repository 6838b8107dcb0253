"""Hands a listening socket to a process as sd_listen_fds(3) has it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

# Only the process itself knows its id beforehand: so it sets the variables, and becomes the command.
_TAKE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.argv[2], sys.argv[2:])
"""


def handing_over(listener: socket.socket, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` with the socket; for `Popen` with it in `pass_fds`."""
    return [sys.executable, "-S", "-c", _TAKE, str(listener.fileno()), *command]


def listening(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that a service manager would keep."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener
