"""Sockets between the ranks: the leader binds, the followers connect.

Calls are one-way, without replies. Followers send messages during start-up and their memory usage from time
to time. libzmq's heartbeats disconnect a rank that is stopped or whose machine is off, but do not detect a
hanging model.

Only the ranks of the set are admitted: by CURVE keys, or by the permissions of an `ipc://` socket. A second
connection under a rank's identity is ignored, and so is a message of any other peer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from protocol import sockets
from protocol.sockets import Curve
from worker.ranks import rpc

log = logging.getLogger(__name__)

BEAT_MS = 1000
CHANGES = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
"""Events of the leader's socket, for `FollowerConnections`."""
_DOMAIN = "roundhouse"

Socket = zmq.Socket[bytes]


class RankGoneError(BaseException):
    """A call failed that was sent to other ranks, or could not be sent: the ranks cannot continue.

    Not an `Exception`, so that no handler between here and the thread's end catches it.
    """


class LeaderLine:
    """The leader's ROUTER socket. For one thread, except the monitor."""

    def __init__(self, endpoint: str, size: int, curve: Curve | None) -> None:
        """`endpoint` may have a wildcard port: `tcp://127.0.0.1:*`. `size`: number of ranks. Raises
        `EndpointError`, or `zmq.ZMQError` if the address is in use."""
        _require_keys(endpoint, curve)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._doorman = _doorman(self._context, curve) if curve is not None else None
        self._socket = sockets.bind_router(
            self._context, endpoint, curve, beat_ms=BEAT_MS, changes=CHANGES, handover=False
        )
        self.monitor = self._socket.get_monitor_socket()
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.connections = FollowerConnections()
        self._file = sockets.SocketFile(self.endpoint)
        self._missing = {_identity(rank): rank for rank in range(1, size)}
        self._peers: dict[bytes, int] = {}

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
        frames: Sequence[zmq.Frame] = ()
        if self._socket.poll(int(1000 * wait_s)):
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        if self._missing:  # otherwise these events are for `PeerMonitor`
            drain(self.monitor, self.connections)
        return self._word(frames) if frames else None

    def _word(self, frames: Sequence[zmq.Frame]) -> rpc.Word | None:
        """Decode a message; None if it is invalid, or not of a rank of this set."""
        try:
            peer, frame = frames
            word = rpc.decode_word(frame.bytes)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("dropped an invalid message of a rank: %s", error)
            return None
        sender = peer.bytes
        if isinstance(word, rpc.RankUp) and self._missing.get(sender) == word.rank:
            self._peers[sender] = self._missing.pop(sender)
            self.connections.admit(int(frame.get(zmq.SRCFD)))
        if sender not in self._peers:
            log.warning("dropped a message of a process that is no rank of this set")
            return None
        return word

    def stop_listening(self) -> None:
        """Remove the file of an `ipc://` socket; connections stay. Called when all ranks have connected."""
        self._file.remove()

    def close(self) -> None:
        self._file.remove()
        self._socket.disable_monitor()
        self.monitor.close(0)
        self._socket.close(0)
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()


class FollowerLine:
    """A follower's DEALER socket. For one thread, except the monitor."""

    def __init__(self, endpoint: str, rank: int, curve: Curve | None) -> None:
        """Connects in the background. Raises `EndpointError`."""
        _require_keys(endpoint, curve)
        self._context: zmq.Context[Socket] = zmq.Context()
        identity = _identity(rank).decode()
        self._socket = sockets.connect_dealer(self._context, endpoint, identity, curve, beat_ms=BEAT_MS)
        self.monitor = self._socket.get_monitor_socket()
        self.connection = LeaderConnection()

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


def _identity(rank: int) -> bytes:
    return f"rank-{rank}".encode()


def _require_keys(endpoint: str, curve: Curve | None) -> None:
    """Raise `EndpointError` for tcp without keys. On loopback too: all users of the machine can connect."""
    if curve is None and not endpoint.startswith("ipc:"):
        raise sockets.EndpointError(
            f"{endpoint}: a connection between ranks over tcp requires CURVE keys (--curve-keys)"
        )


def _doorman(context: zmq.Context[Socket], curve: Curve) -> zmq.auth.thread.ThreadAuthenticator:
    """Start an authenticator: CURVE alone admits all clients that know our public key."""
    doorman = zmq.auth.thread.ThreadAuthenticator(context)
    doorman.start()
    doorman.configure_curve_callback(_DOMAIN, _OneKey(curve.worker_public))
    return doorman


class _OneKey:
    """Credentials provider of pyzmq that accepts the followers' key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client has the key."""
        return key == self._key


_LOOK_S = 0.5
_CLOSE_S_MAX = 5.0


class Connections(Protocol):
    """Connections of one socket, as told by the events of its monitor. `is_lost`: one to a rank is."""

    is_lost: bool

    def on_event(self, event: int, fd: int) -> None: ...


class FollowerConnections:
    """The leader's connections, by file descriptor: those of followers, and strangers'. Pure.

    A descriptor is reused once it is closed, and events of strangers may be read late. What they have left
    behind is known when a follower is admitted, because its own connection was accepted after them.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._closed: set[int] = set()
        self._followers: set[int] = set()

    def on_event(self, event: int, fd: int) -> None:
        """Handle an event, in the order in which they occurred."""
        if event == zmq.EVENT_ACCEPTED:
            self._closed.discard(fd)
        elif event == zmq.EVENT_DISCONNECTED:
            self._closed.add(fd)
            self.is_lost |= fd in self._followers

    def admit(self, fd: int) -> None:
        """Count this connection as a follower's. All earlier events must have been handled."""
        self._followers.add(fd)
        self.is_lost |= fd in self._closed


class LeaderConnection:
    """A follower's connection to the leader: lost when it was established and is gone. Pure."""

    def __init__(self) -> None:
        self.is_lost = False
        self._is_open = False

    def on_event(self, event: int, fd: int) -> None:
        """Handle an event, in the order in which they occurred."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_open = True
        elif event == zmq.EVENT_DISCONNECTED:
            self.is_lost |= self._is_open


def drain(monitor: zmq.Socket[bytes], connections: Connections) -> None:
    """Handle the events that have occurred so far."""
    while monitor.poll(0):
        pass_event(monitor, connections)


def pass_event(monitor: zmq.Socket[bytes], connections: Connections) -> None:
    """Receive one event and handle it."""
    told = recv_monitor_message(monitor)
    connections.on_event(told["event"], told["value"])


class PeerMonitor:
    """Peer-loss monitor. Calls `lost` with a reason, once, on its own thread."""

    def __init__(
        self, monitor: zmq.Socket[bytes], connections: Connections, lost: Callable[[str], None]
    ) -> None:
        self._monitor = monitor
        self._connections = connections
        self._lost = lost
        self._limit: tuple[float, str] = math.inf, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        """Start to watch; events since the socket's creation count too."""
        self._thread.start()

    def allow(self, seconds: float, what: str) -> None:
        """Set a time limit from now for the phase `what`, replacing the last one. From any thread."""
        self._limit = time.monotonic() + seconds, what

    def close(self) -> None:
        """End the thread; waits at most `_CLOSE_S_MAX` seconds if it is in `lost`."""
        self._over.set()
        self._thread.join(_CLOSE_S_MAX)

    def _run(self) -> None:
        if reason := self._reason():
            self._lost(reason)

    def _reason(self) -> str:
        """Watch until a rank is lost and return the reason; empty if closed."""
        while not self._over.is_set():
            at, what = self._limit
            if time.monotonic() >= at:  # checked first, as strangers' events may never cease
                return f"{what} takes too long"
            if self._connections.is_lost:
                return "the connection to a rank is lost"
            if self._monitor.poll(int(1000 * _LOOK_S)):
                pass_event(self._monitor, self._connections)
        return ""
