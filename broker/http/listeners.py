"""Listening sockets: the gateway's own, or those passed by a service manager."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping, Sequence
from ipaddress import ip_address

from broker.http.auth import ApiKeys
from protocol.api_keys import KeysError

BACKLOG = 2048
FIRST_HANDED_OVER = 3
"""The first file descriptor that a service manager passes, per sd_listen_fds(3)."""


class ListenError(Exception):
    """Raised when there is no socket to listen on; the message says why."""


def open_listeners(host: str, port: int, environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """Return the passed sockets, or else one of our own. Raises `ListenError`."""
    try:
        listeners = take_over(environ, pid)
    except (OSError, ValueError) as error:
        raise ListenError(f"cannot use the sockets passed by the service manager: {error}") from error
    try:
        return listeners or [listen(host, port)]
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def listen(host: str, port: int) -> socket.socket:
    """Open the HTTP socket, before anything else, so that a port in use is reported clearly. Raises
    `OSError`."""
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


def take_over(environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """Return the listening sockets passed by a service manager, by the rules of sd_listen_fds(3).

    They outlive this process: clients that connect while it restarts wait for the next one. Removes the
    variables from `environ`. Raises `ValueError` or `OSError` for a descriptor that is not a listening
    socket.
    """
    told = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if told["LISTEN_PID"] != str(pid):  # unset, or meant for a parent process
        return []
    listeners = []
    for number in range(FIRST_HANDED_OVER, FIRST_HANDED_OVER + int(told["LISTEN_FDS"])):
        os.set_inheritable(number, False)
        listener = socket.socket(fileno=number)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise ValueError(f"descriptor {number} is not a listening TCP socket")
        listeners.append(listener)
    return listeners


def check_exposure(
    listeners: Sequence[socket.socket], api_keys_store: ApiKeys, insecure_no_keys: bool
) -> None:
    """Raise `KeysError` if other machines can connect and no API key is required."""
    hosts = [listener.getsockname()[0] for listener in listeners]
    exposed = [host for host in hosts if not ip_address(host).is_loopback]
    if exposed and not api_keys_store.required and not insecure_no_keys:
        raise KeysError(
            f"{exposed[0]} is reachable from other machines and there are no API keys: set --api-keys-file "
            "(or ROUNDHOUSE_API_KEYS), listen on 127.0.0.1, or pass --insecure-no-keys"
        )


def url(listener: socket.socket) -> str:
    """Return the URL of a listener, with its numeric address."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
