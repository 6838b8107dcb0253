"""Listening sockets: those passed by the supervisor or a service manager, or the gateway's own."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping, Sequence
from ipaddress import ip_address

from broker.middleware.auth import ApiKeys
from protocol.common.api_keys import KeysError
from protocol.common.listening import adopted, inherited, listen

FIRST_HANDED_OVER = 3
"""The first file descriptor that a service manager passes, per sd_listen_fds(3)."""


class ListenError(Exception):
    """Raised when there is no socket to listen on; the message says why."""


def open_listeners(host: str, port: int, environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """Return the passed sockets, or else one of our own. Raises `ListenError`."""
    try:
        if (listener := inherited(environ)) is not None:
            return [listener]
        listeners = take_over(environ, pid)
    except (OSError, ValueError) as error:
        raise ListenError(f"cannot use the sockets passed to this process: {error}") from error
    try:
        return listeners or [listen(host, port)]
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def take_over(environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """Return the listening sockets passed by a service manager, by the rules of sd_listen_fds(3).

    They outlive this process: clients that connect while it restarts wait for the next one. Removes the
    variables from `environ`. Raises `ValueError` or `OSError` for a descriptor that is not a listening
    socket.
    """
    variables = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if variables["LISTEN_PID"] != str(pid):  # unset, or meant for a parent process
        return []
    return [adopted(FIRST_HANDED_OVER + number) for number in range(int(variables["LISTEN_FDS"]))]


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
