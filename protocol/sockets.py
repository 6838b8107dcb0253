"""ZeroMQ sockets between gateway and workers: options, high-water marks, access control.

The gateway binds a ROUTER; workers connect a DEALER with their incarnation as identity. `ipc://` sockets are
in a directory that only its owner can write to, by default one that only its owner can enter; `tcp://` on
other interfaces than loopback requires CURVE keys.
"""

from __future__ import annotations

import os
import socket as unix
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.auth

from protocol.common.secure_files import create_private, is_private, is_protected, read_private
from protocol.common.state_folder import SERVER_NAME_CHARS_MAX, state_folder
from protocol.hosts import is_loopback
from protocol.wire import MESSAGE_BYTES_MAX

SEND_QUEUE_MESSAGES_MAX = 4096
RECEIVE_QUEUE_MESSAGES_MAX = 4096
GATEWAY_FRAME_BYTES_MAX = 8 * 2**20
"""Maximum size of a worker's frame: four times that of a step of 4096 rows with twenty logprobs each. The
gateway decodes frames on its event loop, so they must be small."""
LINGER_MS = 500
RECONNECT_MS = 50
BEATS_MISSED_MAX = 5
CHANGES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""Default events of the socket's monitor."""
RECONNECT_MS_MAX = 1000
RECONNECT_IPC_MS_MAX = 200
"""On one machine a try is cheap, and the next gateway is there within a second."""
_CONNECT_S_MAX = 1.0
"""Without this, connecting to a listener with a full backlog that accepts nothing would block for ever."""


class EndpointError(ValueError):
    """An endpoint that is invalid or insecure."""


_SOCKET_PATH_BYTES_MAX = 103
"""The limit of macOS, where `sun_path` has 104 bytes with the final zero. Linux has 107."""
_SOCKET_NAME_BYTES_MAX = len("/ranks-.sock") + SERVER_NAME_CHARS_MAX


@dataclass(frozen=True, slots=True)
class Curve:
    """CURVE keys of one end: fresh ones, or those in a folder made by `write_keys`. Whoever has the worker's
    keys can connect."""

    gateway_public: bytes
    worker_public: bytes
    secret: bytes

    @classmethod
    def load(cls, folder: Path, end: str) -> Curve:
        """Load the keys of `end`, `gateway` or `worker`. Raises `EndpointError` if a key file is missing or
        unreadable, or if others can read the secret."""
        try:
            read_private(folder / f"{end}.key_secret")
            gateway, _ = zmq.auth.load_certificate(folder / "gateway.key")
            worker, _ = zmq.auth.load_certificate(folder / "worker.key")
            _, secret = zmq.auth.load_certificate(folder / f"{end}.key_secret")
        except (OSError, ValueError) as error:
            raise EndpointError(f"CURVE keys in {folder}: {error}") from error
        if secret is None:
            raise EndpointError(f"CURVE keys in {folder}: {end}.key_secret contains no secret key")
        return cls(gateway, worker, secret)

    @classmethod
    def new_pair(cls) -> tuple[Curve, Curve]:
        """Return fresh keys, of the gateway's end and of the worker's."""
        (gateway, gateway_secret), (worker, worker_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(gateway, worker, gateway_secret), cls(gateway, worker, worker_secret)


def write_keys(folder: Path) -> None:
    """Create the key pairs of both ends in `folder`, readable by their owner only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with create_private():
        for end in ("gateway", "worker"):
            zmq.auth.create_certificates(folder, end)


def runtime_directory() -> Path:
    """Return the folder for `ipc://` sockets, created with mode 0700. Raises `EndpointError`.

    Without XDG_RUNTIME_DIR it is in the user's state folder, which nothing cleans up, as temporary files are.
    """
    # The XDG base directory specification requires that relative paths are ignored.
    base = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    folder = base / "roundhouse" if base.is_absolute() else _state_folder()
    folder = folder or Path(tempfile.gettempdir()) / f"roundhouse-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        hint = ": unset XDG_RUNTIME_DIR, or set it to a folder of yours" if base.is_absolute() else ""
        raise EndpointError(f"{folder} cannot be created: {error.strerror}{hint}") from error
    if not is_private(folder):
        raise EndpointError(f"{folder} must be a directory owned by you with mode 0700")
    _require_protected(folder)
    return folder


def _state_folder() -> Path | None:
    """Return the folder for sockets in the user's state folder. None: it cannot be used, or paths of sockets
    in it would be too long."""
    try:
        folder = state_folder(os.environ) / "run"
        if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES_MAX > _SOCKET_PATH_BYTES_MAX:
            return None
        with create_private():
            folder.parent.mkdir(parents=True, exist_ok=True)
        return folder if is_protected(folder.parent) else None
    except (OSError, RuntimeError):  # there is no home, or nobody can write to it
        return None


def default_path(server: str) -> Path:
    """Return the socket of a server's default worker endpoint. `server`: its `server_name`."""
    return runtime_directory() / f"{server}.sock"


def default_endpoint(server: str) -> str:
    """Return a server's default worker endpoint. Raises `EndpointError`."""
    return f"ipc://{default_path(server)}"


def control_path(server: str) -> Path:
    """Return the control socket of a server's supervisor. Raises `EndpointError`."""
    return runtime_directory() / f"serve-{server}"


def remove_stale(path: Path) -> bool:
    """Remove the Unix socket of a process that was killed. Return False if a process listens there. Raises
    `OSError`."""
    if _listens(path):
        return False
    path.unlink(missing_ok=True)
    return True


def _listens(path: Path) -> bool:
    with unix.socket(unix.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_S_MAX)
        try:
            probe.connect(str(path))
        except (TimeoutError, BlockingIOError):
            return True  # it accepts no connection
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def check_unused(endpoint: str) -> None:
    """Raise `EndpointError` if a process listens at an `ipc://` endpoint: libzmq would take its place."""
    if not endpoint.startswith("ipc:"):
        return
    _check_path(endpoint)
    if _listens(Path(endpoint.removeprefix("ipc://"))):
        raise EndpointError(f"{endpoint} is in use by another process")


def check_endpoint(endpoint: str, curve: Curve | None) -> None:
    """Raise `EndpointError` for an endpoint that is invalid or that others could access."""
    try:
        parts = urlsplit(endpoint)
    except ValueError as error:
        raise EndpointError(f"{endpoint}: {error}") from error
    if parts.scheme == "ipc":
        return
    if parts.scheme != "tcp":
        raise EndpointError(f"{endpoint}: must begin with ipc:// or tcp://")
    if curve is None and not is_loopback(parts.hostname or ""):
        raise EndpointError(f"{endpoint}: tcp on a non-loopback address requires CURVE keys (--curve-keys)")


def _require_protected(folder: Path) -> None:
    """Raise `EndpointError` if other users can replace a socket in `folder`."""
    try:
        if is_protected(folder):
            return
    except OSError as error:
        raise EndpointError(f"{folder}: {error.strerror}") from error
    raise EndpointError(
        f"{folder}: a folder with sockets, and those above it, must belong to you or root, and be writable by"
        " no one else"
    )


def _check_path(endpoint: str) -> None:
    """Raise `EndpointError` if the path of an `ipc://` endpoint is too long, or no place for a socket."""
    path = Path(endpoint.removeprefix("ipc://"))
    if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
        raise EndpointError(f"{endpoint}: the path has more than {zmq.IPC_PATH_MAX_LEN} bytes")
    # A worker may start before its gateway, whose folder may not exist yet: then the one above it counts.
    _require_protected(next(folder for folder in path.absolute().parents if folder.exists()))
    if path.exists() and not path.is_socket():
        raise EndpointError(f"{path} is not a socket")


class SocketFile:
    """File of a bound `ipc://` endpoint, which libzmq leaves behind when the socket is closed."""

    def __init__(self, endpoint: str) -> None:
        """Called when the endpoint is bound. Other endpoints have no file."""
        self._path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc:") else None
        self._info = self._path.stat() if self._path is not None else None

    def remove(self) -> None:
        """Remove the file, unless another process has bound the endpoint since."""
        if self._path is None or self._info is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), self._info):
                self._path.unlink()


def _prepare(socket: zmq.Socket[bytes], frame_bytes_max: int, beat_ms: int, changes: int = CHANGES) -> None:
    # The monitor must exist before the first connection, or its event is missed. Later calls of
    # `get_monitor_socket` return this one.
    socket.get_monitor_socket(changes)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # libzmq disconnects a peer that sends a larger frame, before allocating memory for it.
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
    if beat_ms:
        # libzmq's heartbeats, on its own thread: a peer that is stopped or switched off is disconnected.
        socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, BEATS_MISSED_MAX * beat_ms)


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    curve: Curve | None,
    join: str = "",
    *,
    beat_ms: int = 0,
    changes: int = CHANGES,
    handover: bool = True,
) -> zmq.Socket[bytes]:
    """Bind the gateway's ROUTER socket. `join`: an additional address, if not empty. `beat_ms`: heartbeat
    interval; 0: no heartbeats. `changes`: events of its monitor. `handover`: a new connection with a known
    identity replaces the old one. Raises `EndpointError`, or `zmq.ZMQError` if an address is in use."""
    endpoints = [endpoint, join] if join else [endpoint]
    for address in endpoints:
        check_endpoint(address, curve)
        if address.startswith("ipc:"):
            _check_path(address)
    socket = context.socket(zmq.ROUTER)
    _prepare(socket, GATEWAY_FRAME_BYTES_MAX, beat_ms, changes)
    # Without this, a message to a disconnected worker, or one with a full queue, is silently dropped.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A worker may reconnect before its old connection is removed; its identity is unique. Without this, the
    # new connection would be silently refused.
    socket.setsockopt(zmq.ROUTER_HANDOVER, int(handover))
    if curve is not None:
        socket.curve_server = True
        socket.curve_secretkey = curve.secret
        socket.curve_publickey = curve.gateway_public
        socket.setsockopt(zmq.ZAP_DOMAIN, b"roundhouse")
    for address in endpoints:
        # Write permission on a Unix socket allows connecting to it, and its folder may be public.
        with create_private() if address.startswith("ipc:") else nullcontext():
            socket.bind(address)
    return socket


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: str,
    curve: Curve | None,
    *,
    beat_ms: int = 0,
) -> zmq.Socket[bytes]:
    """Connect a worker's DEALER socket, in the background and with retries. `beat_ms`: heartbeat interval; 0:
    no heartbeats. Raises `EndpointError`."""
    check_endpoint(endpoint, curve)
    if endpoint.startswith("ipc:"):
        _check_path(endpoint)
    socket = context.socket(zmq.DEALER)
    _prepare(socket, MESSAGE_BYTES_MAX, beat_ms)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    # Queue nothing while no gateway is connected: it would be stale when one connects.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    is_near = endpoint.startswith("ipc:")
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_IPC_MS_MAX if is_near else RECONNECT_MS_MAX)
    if curve is not None:
        socket.curve_serverkey = curve.gateway_public
        socket.curve_publickey = curve.worker_public
        socket.curve_secretkey = curve.secret
    socket.connect(endpoint)
    return socket


def poller(*readable: zmq.Socket[bytes] | int) -> zmq.Poller:
    """Return a poller for readable sockets or file descriptors. Reusing it is several times cheaper than
    `Socket.poll`, which makes a new one for each call."""
    made = zmq.Poller()
    for each in readable:
        made.register(each, zmq.POLLIN)
    return made
