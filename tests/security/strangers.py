"""A stranger at a socket between our processes: every kind of handshake, and leaving at any point of it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import zmq

from worker.ranks import rpc

KNOCK_S = 0.3
_GREETING = b"\xff" + bytes(8) + b"\x7f"
GREETINGS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x01\x00",  # ZMTP 1.0
    _GREETING,
    _GREETING + b"\x01\x05\x00\x00",  # ZMTP 2.0
    _GREETING + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32),
    _GREETING + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\x20\x05HELLO" + bytes(25),
    bytes(range(256)) * 64,
)
"""What a stranger sends before it leaves."""


@contextlib.contextmanager
def connected(endpoint: str) -> Iterator[socket.socket]:
    """A plain connection to a `tcp://` or `ipc://` endpoint."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET) as made:
        made.settimeout(5.0)
        made.connect(address if scheme == "ipc" else (host, int(port)))
        yield made


def disturb(endpoint: str) -> None:
    """Connect with each greeting, and leave, orderly or with a reset."""
    for said in GREETINGS:
        for is_reset in (False, True):
            with contextlib.suppress(OSError), connected(endpoint) as made:
                made.sendall(said)
                if is_reset:
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def knock(endpoint: str, seconds: float = KNOCK_S) -> list[bytes]:
    """Pretend to be rank 1, without keys and with keys of its own; return all frames received."""
    received: list[bytes] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for identity in (b"rank-1", b"stranger"):
            for has_keys in (False, True):
                received += _knock(context, endpoint, identity, seconds, has_keys=has_keys)
    finally:
        context.destroy(0)
    return received


def _knock(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes, seconds: float, *, has_keys: bool
) -> list[bytes]:
    received = []
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    if has_keys:
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = zmq.curve_keypair()[0]
    dealer.connect(endpoint)
    for word in (rpc.RankUp(1, "stranger"), rpc.WeightsLoaded(1), rpc.Refused(1, "no", True)):
        with contextlib.suppress(zmq.Again):
            dealer.send(rpc.encode(word), zmq.NOBLOCK)
    while dealer.poll(int(1000 * seconds)):
        received.append(dealer.recv())
    dealer.close(0)
    return received
