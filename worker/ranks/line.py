"""Sockets between the ranks: the leader binds, the followers connect.

Calls are one-way, without replies. Followers send messages during start-up and their memory usage from time
to time. libzmq's heartbeats disconnect a rank that is stopped or whose machine is off, but do not detect a
hanging model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.auth.thread

from protocol import sockets
from worker.ranks import rpc

log = logging.getLogger(__name__)

BEAT_MS = 1000
CHANGES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
"""Events of the sockets that `PeerMonitor` receives."""

Socket = zmq.Socket[bytes]


class RankGoneError(BaseException):
    """A call failed that was sent to other ranks, or could not be sent: the ranks cannot continue.

    Not an `Exception`, so that no handler between here and the thread's end catches it.
    """


class LeaderLine:
    """The leader's ROUTER socket. For one thread, except the monitor."""

    def __init__(self, endpoint: str, keys: Path | None) -> None:
        """`endpoint` may have a wildcard port: `tcp://127.0.0.1:*`. `keys`: folder with CURVE keys. Raises
        `EndpointError`, or `zmq.ZMQError` if the address is in use."""
        self._context: zmq.Context[Socket] = zmq.Context()
        curve = sockets.Curve.load(keys, "gateway") if keys else None
        self._doorman = _doorman(self._context, keys) if keys else None
        self._socket = sockets.bind_router(self._context, endpoint, curve, beat_ms=BEAT_MS, changes=CHANGES)
        self.monitor = self._socket.get_monitor_socket()
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peers: list[bytes] = []

    def call(self, called: rpc.Call) -> None:
        """Send a call to all connected ranks without blocking. Raises `RankGoneError`."""
        frame = rpc.encode(called)
        try:
            for peer in self._peers:
                self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise RankGoneError(f"a call cannot be sent to a rank: {error}") from error

    def receive(self, wait_s: float) -> rpc.Word | None:
        """Receive a follower's message, or None after `wait_s` seconds."""
        if not self._socket.poll(int(1000 * wait_s)):
            return None
        frames: Sequence[bytes] = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            peer, frame = frames
            word = rpc.decode_word(frame)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("dropped an invalid message of a rank: %s", error)
            return None
        if isinstance(word, rpc.RankUp) and peer not in self._peers:
            self._peers.append(peer)
        return word

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(0)
        self._socket.close(0)
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()


class FollowerLine:
    """A follower's DEALER socket. For one thread, except the monitor."""

    def __init__(self, endpoint: str, rank: int, keys: Path | None) -> None:
        """Connects in the background. Raises `EndpointError`."""
        self._context: zmq.Context[Socket] = zmq.Context()
        curve = sockets.Curve.load(keys, "worker") if keys else None
        self._socket = sockets.connect_dealer(self._context, endpoint, f"rank-{rank}", curve, beat_ms=BEAT_MS)
        self.monitor = self._socket.get_monitor_socket()

    def send(self, word: rpc.Word, wait_s: float) -> bool:
        """Send a message; return False if it could not be sent within `wait_s` seconds."""
        if not self._socket.poll(int(1000 * wait_s), zmq.POLLOUT):
            return False
        try:
            # The leader may have disconnected since the poll; a blocking send would wait for a new one.
            self._socket.send(rpc.encode(word), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, wait_s: float | None = None) -> rpc.Call | None:
        """Receive the next call; return None after `wait_s` seconds. `wait_s` None: wait for ever."""
        if wait_s is not None and not self._socket.poll(int(1000 * wait_s)):
            return None
        return rpc.decode_call(self._socket.recv())

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(0)
        self._socket.close(sockets.LINGER_MS)
        self._context.term()


def _doorman(context: zmq.Context[Socket], keys: Path) -> zmq.auth.thread.ThreadAuthenticator:
    """Start an authenticator, as the gateway does: CURVE alone admits all clients with our public key."""
    doorman = zmq.auth.thread.ThreadAuthenticator(context)
    doorman.start()
    doorman.configure_curve(domain="roundhouse", location=str(keys))
    return doorman
