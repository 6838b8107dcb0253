"""How the two ends of the line are made: options, high-water marks, who may connect.

The gateway binds a ROUTER, workers connect a DEALER under their incarnation as identity. `ipc://` lives in a
directory only its owner can enter; `tcp://` off loopback is refused without CURVE keys.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.auth

from protocol.hosts import is_loopback
from protocol.private import is_private, made_private, read_private
from protocol.wire import MESSAGE_BYTES_MAX

SEND_QUEUE_MESSAGES_MAX = 4096
RECEIVE_QUEUE_MESSAGES_MAX = 4096
GATEWAY_FRAME_BYTES_MAX = 8 * 2**20
"""Of what a worker sends: four times what a step of 4096 rows has to say, with twenty likelihoods each. The
gateway decodes it between the events of others."""
LINGER_MS = 500
RECONNECT_MS = 50
BEATS_MISSED_MAX = 5
CHANGES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""What the socket's monitor tells, where nothing else is asked for."""
RECONNECT_MS_MAX = 1000


class EndpointError(ValueError):
    """An endpoint that must not be used as asked."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Keys of both ends, from a folder made by `write_keys`: whoever can read it may join the line."""

    gateway_public: bytes
    worker_public: bytes
    secret: bytes

    @classmethod
    def load(cls, folder: Path, end: str) -> Curve:
        """`end` is `gateway` or `worker`. Raises `EndpointError` when a key file is missing or unreadable,
        or when the secret is open to others."""
        try:
            read_private(folder / f"{end}.key_secret")
            gateway, _ = zmq.auth.load_certificate(folder / "gateway.key")
            worker, _ = zmq.auth.load_certificate(folder / "worker.key")
            _, secret = zmq.auth.load_certificate(folder / f"{end}.key_secret")
        except (OSError, ValueError) as error:
            raise EndpointError(f"CURVE keys in {folder}: {error}") from error
        if secret is None:
            raise EndpointError(f"CURVE keys in {folder}: {end}.key_secret holds no secret")
        return cls(gateway, worker, secret)


def write_keys(folder: Path) -> None:
    """Make the key pairs of both ends in `folder`, readable by their owner only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with made_private():
        for end in ("gateway", "worker"):
            zmq.auth.create_certificates(folder, end)


def runtime_directory() -> Path:
    """The folder for `ipc://` sockets: made with mode 0700 and ours alone. Raises `EndpointError`."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "roundhouse" if base else Path(tempfile.gettempdir()) / f"roundhouse-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise EndpointError(f"{folder} cannot be made: {error.strerror}") from error
    if not is_private(folder):
        raise EndpointError(f"{folder} must be a directory of yours with mode 0700")
    return folder


def default_endpoint(port: int) -> str:
    """Where the gateway that serves HTTP on `port` meets its workers."""
    return f"ipc://{runtime_directory()}/{port}.sock"


def check_endpoint(endpoint: str, curve: Curve | None) -> None:
    """Raises `EndpointError` for an endpoint that others could listen on or speak to."""
    try:
        parts = urlsplit(endpoint)
    except ValueError as error:
        raise EndpointError(f"{endpoint}: {error}") from error
    if parts.scheme == "ipc":
        return
    if parts.scheme != "tcp":
        raise EndpointError(f"{endpoint}: must begin with ipc:// or tcp://")
    if curve is None and not is_loopback(parts.hostname or ""):
        raise EndpointError(f"{endpoint}: tcp off loopback needs CURVE keys (--curve-keys)")


def _prepare(socket: zmq.Socket[bytes], frame_bytes_max: int, beat_ms: int, changes: int = CHANGES) -> None:
    # The monitor must be there before the first connection is, or that one's event is missed. Whoever asks
    # the socket for its monitor later gets this one.
    socket.get_monitor_socket(changes)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # A peer that sends more in one frame is disconnected by libzmq before it costs memory.
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
    if beat_ms:
        # libzmq's own, by its own thread: a peer that is stopped, or whose machine is off, is disconnected.
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
) -> zmq.Socket[bytes]:
    """The gateway's end. `join`: another address, if there is to be one. `beat_ms`: how often peers must be
    heard of; 0: they need not. `changes`: what its monitor tells. Raises `EndpointError`, or `zmq.ZMQError`
    when an address is taken."""
    endpoints = [endpoint, join] if join else [endpoint]
    for address in endpoints:
        check_endpoint(address, curve)
    socket = context.socket(zmq.ROUTER)
    _prepare(socket, GATEWAY_FRAME_BYTES_MAX, beat_ms, changes)
    # Without it a message to a worker that is gone, or whose queue is full, vanishes silently.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A worker whose connection broke may be back before the old one is cleared away; its name is its own.
    # Without this the new connection would be refused in silence, and the worker never heard again.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if curve is not None:
        socket.curve_server = True
        socket.curve_secretkey = curve.secret
        socket.curve_publickey = curve.gateway_public
        socket.setsockopt(zmq.ZAP_DOMAIN, b"roundhouse")
    for address in endpoints:
        # Whoever may write to a Unix socket may connect to it, wherever it was asked for.
        with made_private() if address.startswith("ipc:") else nullcontext():
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
    """A worker's end. Connects in the background, again and again. `beat_ms`: see `bind_router`. Raises
    `EndpointError`."""
    check_endpoint(endpoint, curve)
    socket = context.socket(zmq.DEALER)
    _prepare(socket, MESSAGE_BYTES_MAX, beat_ms)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    # Nothing is queued for a gateway that is not there: it would be stale when one comes.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
    if curve is not None:
        socket.curve_serverkey = curve.gateway_public
        socket.curve_publickey = curve.worker_public
        socket.curve_secretkey = curve.secret
    socket.connect(endpoint)
    return socket


def poller(*readable: zmq.Socket[bytes] | int) -> zmq.Poller:
    """Says which of them, sockets or file descriptors, have something to be read. One that is made anew for
    each look, as `Socket.poll` does, costs several times as much."""
    made = zmq.Poller()
    for each in readable:
        made.register(each, zmq.POLLIN)
    return made
