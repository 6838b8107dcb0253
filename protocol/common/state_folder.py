"""Our folder in the user's state folder: what a restart needs, and nothing cleans up.

Everything that belongs to one server is named by `server_name`: sockets, lock, journal and batches.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from protocol.common.cache_folder import xdg_folder

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
ADDRESS_CHARS_MAX = 15
"""Every IPv4 address fits. Paths of sockets are short (`protocol.sockets`), so longer ones are hashed."""
SERVER_NAME_CHARS_MAX = len("65535-") + ADDRESS_CHARS_MAX

_REACHED_AT_DEFAULT = ("", "localhost", DEFAULT_HOST, "0.0.0.0", "::")
_READABLE = re.compile(rf"[a-z0-9._-]{{1,{ADDRESS_CHARS_MAX}}}")


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return our folder in the user's state folder, on every system.

    Raises `RuntimeError` if there is no home.
    """
    return xdg_folder(environ, "XDG_STATE_HOME", ".local/state")


def server_name(host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> str:
    """Return the name of a server's state, by its address for clients: `PORT-ADDRESS`.

    It is `PORT` alone for the server that clients reach at 127.0.0.1, also one that listens everywhere: there
    can be only one. A host name stands for itself, because its address may change.
    """
    address = _canonical(host)
    if address in _REACHED_AT_DEFAULT:
        return str(port)
    readable = address.replace(":", "_")
    if _READABLE.fullmatch(readable) is None:
        readable = sha256(address.encode()).hexdigest()[:ADDRESS_CHARS_MAX]
    return f"{port}-{readable}"


def _canonical(host: str) -> str:
    """Return the usual spelling of an address, or the host name in lower case."""
    try:
        found = ip_address(host)
    except ValueError:
        try:
            return socket.inet_ntoa(socket.inet_aton(host))  # such as 127.1, which sockets accept
        except (OSError, ValueError):
            return host.lower().removesuffix(".")
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


JOURNAL_NAME = "journal.sqlite"


def journal_file(folder: Path | None, environ: Mapping[str, str], server: str) -> Path:
    """Return a server's journal. `folder`: by a setting. Raises `RuntimeError` if there is no home."""
    return (folder or state_folder(environ) / "journal" / server) / JOURNAL_NAME


def batch_folder(environ: Mapping[str, str], server: str) -> Path:
    """Return the folder of a server's batches. Raises `RuntimeError` if there is no home."""
    return state_folder(environ) / "batches" / server
