"""The sockets that clients connect to: our own, or such as a service manager keeps for us."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping, Sequence
from ipaddress import ip_address

from broker.http.auth import Keyring, KeysError

BACKLOG = 2048
FIRST_HANDED_OVER = 3
"""The number of the first descriptor that a service manager hands over, says sd_listen_fds(3)."""


class ListenError(Exception):
    """There is nothing to listen at; the message says why."""


def open_listeners(host: str, port: int, environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """What was handed over, or else a socket of our own. Raises `ListenError`."""
    try:
        listeners = take_over(environ, pid)
    except (OSError, ValueError) as error:
        raise ListenError(f"cannot take over sockets: {error}") from error
    try:
        return listeners or [listen(host, port)]
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def listen(host: str, port: int) -> socket.socket:
    """The HTTP socket, bound before anything else so that a taken port is said plainly. Raises `OSError`."""
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
    """The listening sockets that a service manager keeps for us, by the rules of sd_listen_fds(3).

    They outlive this process: who connects while there is none waits for the next. Takes what tells of them
    out of `environ`. Raises `ValueError` or `OSError` for what is no listening socket.
    """
    told = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if told["LISTEN_PID"] != str(pid):  # none, or left over from a process further up
        return []
    listeners = []
    for number in range(FIRST_HANDED_OVER, FIRST_HANDED_OVER + int(told["LISTEN_FDS"])):
        os.set_inheritable(number, False)
        listener = socket.socket(fileno=number)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise ValueError(f"descriptor {number} does not listen for TCP")
        listeners.append(listener)
    return listeners


def check_exposure(listeners: Sequence[socket.socket], keyring: Keyring, insecure_no_keys: bool) -> None:
    """Raises `KeysError` where others can reach us, and nobody needs a key."""
    hosts = [listener.getsockname()[0] for listener in listeners]
    exposed = [host for host in hosts if not ip_address(host).is_loopback]
    if exposed and not keyring.required and not insecure_no_keys:
        raise KeysError(
            f"{exposed[0]} can be reached from other machines and there are no API keys: set --api-keys-file "
            "(or ROUNDHOUSE_API_KEYS), listen on 127.0.0.1, or say --insecure-no-keys"
        )


def url(listener: socket.socket) -> str:
    """Where clients find it, by the number of its address."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
