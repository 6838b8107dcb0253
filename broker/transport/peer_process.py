"""Peer process of a connection by its file descriptor: lookup, shutdown and kill.

ZeroMQ opens and closes descriptors on its own thread, so one may be closed already: all functions here handle
that.
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
"""Constants of macOS's sys/un.h, which Python lacks."""


def _opened(descriptor: int) -> socket.socket:
    """Return a duplicate of the connection, to be closed by the caller. The family does not matter here."""
    return socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM)


def peer_pid(descriptor: int) -> int | None:
    """Return the process id of the peer of a Unix socket; None if unknown.

    It comes from the operating system, not from the peer itself.
    """
    try:
        with _opened(descriptor) as connection:
            if isinstance(connection.getsockname(), tuple):
                return None  # an internet socket
            if sys.platform == "darwin":
                return connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID) or None
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    except OSError:
        return None
    pid: int = _PEER_CREDENTIALS.unpack(found)[0]
    return pid or None  # 0: a process in another namespace


def is_distant(descriptor: int) -> bool:
    """Return whether the connection uses internet protocols, so the peer may be on another machine."""
    try:
        with _opened(descriptor) as connection:
            return isinstance(connection.getsockname(), tuple)
    except OSError:
        return False


def cut(descriptor: int) -> None:
    """Shut down a connection below ZeroMQ, which cannot do that itself and finds it closed."""
    with contextlib.suppress(OSError), _opened(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def kill_peer(descriptors: Iterable[int], pid: int) -> bool:
    """Send SIGKILL to an unresponsive worker's process. Return whether that was done.

    `pid` is what the worker reported. It is killed only if one of `descriptors`, the worker's connections,
    was made by that process. Otherwise it is spared: the worker is out of service already, but killing an
    unrelated process cannot be undone.
    """
    if pid <= 1 or pid == os.getpid() or pid not in {peer_pid(descriptor) for descriptor in descriptors}:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
