"""What the system knows of a connection, and what can be done to it, by its file descriptor.

ZeroMQ opens and closes the descriptors on a thread of its own, so one may be gone by the time it is asked of:
everything here takes that for an answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterable

_PEER_CREDENTIALS = struct.Struct("iII")
"""Linux's `struct ucred`: process, user and group."""
_SOL_LOCAL, _LOCAL_PEERPID = 0, 2
"""Of macOS's sys/un.h; Python does not name them."""


def _opened(descriptor: int) -> socket.socket:
    """The same connection once more, to be closed again. What family it is of makes no difference here."""
    return socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM)


def peer_pid(descriptor: int) -> int | None:
    """The process that has connected at the other end of a Unix socket; None where there is no telling.

    It is the system's word: what a process says of itself does not come into it.
    """
    try:
        with _opened(descriptor) as connection:
            if isinstance(connection.getsockname(), tuple):
                return None  # the descriptor is of the Internet's
            if sys.platform == "darwin":
                return connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID) or None
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    except OSError:
        return None
    pid: int = _PEER_CREDENTIALS.unpack(found)[0]
    return pid or None  # 0: it lives in a namespace that we cannot see


def is_distant(descriptor: int) -> bool:
    """Whether the connection is over the Internet's protocols, and may lead to another machine."""
    try:
        with _opened(descriptor) as connection:
            return isinstance(connection.getsockname(), tuple)
    except OSError:
        return False


def cut(descriptor: int) -> None:
    """End a connection from below: ZeroMQ has no word for that, and finds it closed."""
    with contextlib.suppress(OSError), _opened(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def kill_peer(descriptors: Iterable[int], pid: int) -> bool:
    """End the process with this id, a worker that hangs: it has no ears for a polite word. False: not done.

    Which process that is it has said itself. It is believed where one of these connections, which are its
    own, was made by that process. Where they are gone, or nobody can tell, it is left alone: a worker that
    hangs is out of service already, and a stranger's process would be lost for good.
    """
    if pid <= 1 or pid == os.getpid() or pid not in {peer_pid(descriptor) for descriptor in descriptors}:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
