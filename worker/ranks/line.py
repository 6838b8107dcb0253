"""The sockets between the ranks of a set: the first one's, which all others connect to, and theirs.

What the first rank calls goes one way: nobody answers a call. Words come back while the set is made, and now
and then one of what a rank takes.
libzmq's own heartbeats disconnect a rank that is stopped, or whose machine is off; that its model hangs they
do not see.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.auth.thread

from protocol import sockets
from worker.ranks import calls

log = logging.getLogger(__name__)

BEAT_MS = 1000
CHANGES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
"""What `watch.Watch` is told of a socket."""

Socket = zmq.Socket[bytes]


class RankGoneError(BaseException):
    """A call has failed that others have been told to carry out, or they cannot be told: the set is no more.

    Not an `Exception`: there is nobody in between who could go on.
    """


class LeaderLine:
    """The first rank's end. For one thread, but for the monitor."""

    def __init__(self, endpoint: str, keys: Path | None) -> None:
        """`endpoint` may leave the port to us: `tcp://127.0.0.1:*`. `keys`: a folder with CURVE keys. Raises
        `EndpointError`, or `zmq.ZMQError` where the address is taken."""
        self._context: zmq.Context[Socket] = zmq.Context()
        curve = sockets.Curve.load(keys, "gateway") if keys else None
        self._doorman = _doorman(self._context, keys) if keys else None
        self._socket = sockets.bind_router(self._context, endpoint, curve, beat_ms=BEAT_MS, changes=CHANGES)
        self.monitor = self._socket.get_monitor_socket()
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peers: list[bytes] = []

    def call(self, called: calls.Call) -> None:
        """Tell all ranks that have been heard of. Never waits. Raises `RankGoneError`."""
        frame = calls.encode(called)
        try:
            for peer in self._peers:
                self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise RankGoneError(f"a rank cannot be told: {error}") from error

    def hear(self, wait_s: float) -> calls.Word | None:
        """What some rank says within that time."""
        if not self._socket.poll(int(1000 * wait_s)):
            return None
        frames: Sequence[bytes] = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            peer, frame = frames
            word = calls.decode_word(frame)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("dropped what is no word of a rank's: %s", error)
            return None
        if isinstance(word, calls.Here) and peer not in self._peers:
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
    """Any other rank's. For one thread, but for the monitor."""

    def __init__(self, endpoint: str, rank: int, keys: Path | None) -> None:
        """Connects in the background. Raises `EndpointError`."""
        self._context: zmq.Context[Socket] = zmq.Context()
        curve = sockets.Curve.load(keys, "worker") if keys else None
        self._socket = sockets.connect_dealer(self._context, endpoint, f"rank-{rank}", curve, beat_ms=BEAT_MS)
        self.monitor = self._socket.get_monitor_socket()

    def say(self, word: calls.Word, wait_s: float) -> bool:
        """Whether it could be sent within that time."""
        if not self._socket.poll(int(1000 * wait_s), zmq.POLLOUT):
            return False
        self._socket.send(calls.encode(word))
        return True

    def hear(self, wait_s: float | None = None) -> calls.Call | None:
        """The next call, if it comes within that time; None: whenever it comes."""
        if wait_s is not None and not self._socket.poll(int(1000 * wait_s)):
            return None
        return calls.decode_call(self._socket.recv())

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(0)
        self._socket.close(sockets.LINGER_MS)
        self._context.term()


def _doorman(context: zmq.Context[Socket], keys: Path) -> zmq.auth.thread.ThreadAuthenticator:
    """As the gateway has one: CURVE alone lets in whoever knows our public key."""
    doorman = zmq.auth.thread.ThreadAuthenticator(context)
    doorman.start()
    doorman.configure_curve(domain="roundhouse", location=str(keys))
    return doorman
