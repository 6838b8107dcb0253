"""ROUTER socket on the event loop: reads and decodes frames and calls the dispatcher; never raises.

The socket's file descriptor is edge-triggered: after every read or send the socket must be polled again, or a
message stays unread until the next one arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from protocol import sockets, wire
from protocol.messages import Message, ToGateway
from protocol.server_lock import ServerLock

log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE = 128
_BYTES_AT_ONCE = 256 * 1024
"""Messages, and their bytes, that are read before other tasks of the loop run."""

LEFT_ALONE = "not killed, because its connection could not be matched to that process"

OnMessage = Callable[[str, ToGateway], None]
"""(sender, message)"""


class RouterLink:
    """The gateway's ROUTER socket. All callbacks run on the event loop."""

    def __init__(
        self,
        endpoint: str,
        curve_keys: Path | None,
        *,
        join: str = "",
        lock: ServerLock | None = None,
    ) -> None:
        """Bind, to `join` as well if that is given. `lock`: released with the sockets. Raises
        `sockets.EndpointError` or `zmq.ZMQError`."""
        curve = sockets.Curve.load(curve_keys, "gateway") if curve_keys else None
        self.errors: Counter[str] = Counter()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._auth_thread = self._start_auth_thread(curve_keys) if curve_keys else None
        self._socket = sockets.bind_router(self._context, endpoint, curve, join)
        self._files = [sockets.SocketFile(address) for address in (endpoint, join)]
        self._monitor = self._socket.get_monitor_socket()
        self._frames, self._changes = sockets.poller(self._socket), sockets.poller(self._monitor)
        self._peer_by_fd: dict[int, str] = {}
        self._connected: set[str] = set()
        """Peers that were heard and whose loss was not reported since: several connections of one peer can be
        lost at once, or in another order than that of their messages."""
        self._lock = lock
        self._on_message: OnMessage = lambda sender, message: None
        self._lost: Callable[[str], None] = lambda sender: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        """Whether a read is scheduled for the next iteration of the loop."""

    def _start_auth_thread(self, keys: Path) -> zmq.auth.thread.ThreadAuthenticator:
        """Authenticate peers by the worker key: plain CURVE admits anyone who knows the public key."""
        authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve(domain="roundhouse", location=str(keys))
        return authenticator

    def start(self, on_message: OnMessage, lost: Callable[[str], None]) -> None:
        """Start to read, on the running loop."""
        self._on_message, self._lost = on_message, lost
        self._loop = asyncio.get_running_loop()
        for each in (self._socket, self._monitor):
            self._loop.add_reader(each.fileno(), self._read_unless_due)
        self._read_soon()

    def close(self) -> None:
        """Stop reading, close the sockets and remove their files; what is queued gets `sockets.LINGER_MS`."""
        if self._loop is not None:
            for socket in (self._socket, self._monitor):
                self._loop.remove_reader(socket.fileno())
        for file in self._files:
            file.remove()
        if self._lock is not None:
            self._lock.release()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        if self._auth_thread is not None:
            self._auth_thread.stop()
        self._context.term()

    def send(self, peer: str, message: Message, media: Sequence[bytes] = ()) -> bool:
        """Queue a message to a worker. Return False if it has no connection, or its queue is full.

        Raises `wire.WireError` for a message that cannot be encoded.
        """
        frames = wire.encode(message, media)
        try:
            self._socket.send_multipart([peer.encode(), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.errors[f"send: {error}"] += 1
            return False
        finally:
            self._read_soon()
        return True

    def end(self, peer: str, pid: int) -> str:
        """Kill or disconnect an unresponsive peer; return which, for the log.

        On this machine its process `pid` is killed if it is the one at the other end. A peer on another
        machine is disconnected; if it recovers, it reconnects and sends a new Hello.
        """
        connections = [fd for fd, spoke in self._peer_by_fd.items() if spoke == peer]
        if kill_peer(connections, pid):
            return "killed"
        distant = [fd for fd in connections if is_distant(fd)]
        for fd in distant:
            cut(fd)
        return "disconnected" if distant else LEFT_ALONE

    def _read_soon(self) -> None:
        """Schedule one read in the next iteration of the loop; consumers of messages run in between."""
        if self._loop is not None and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._read)

    def _read_unless_due(self) -> None:
        if not self._is_due:
            self._read()

    def _read(self) -> None:
        self._is_due = False
        # Broken connections are collected before the frames are read and handled after them, so that a
        # worker's last messages still count.
        broken = self._broken()
        if broken:
            more = self._read_last_words(len(broken))
        else:
            more = self._read_frames(_MESSAGES_AT_ONCE, _BYTES_AT_ONCE)
        for fd, peer in broken:
            # Its last messages, perhaps its first too, were read only now, after the connection was closed.
            if peer is None or self._peer_by_fd.get(fd) == peer:
                peer = self._peer_by_fd.pop(fd, None)
            # A peer that has reconnected meanwhile is not lost: its Hello was handled.
            if peer in self._connected and peer not in self._peer_by_fd.values():
                self._connected.discard(peer)
                self._lost(peer)
        if more:
            self._read_soon()

    def _broken(self) -> list[tuple[int, str | None]]:
        """Return connections closed since the last call: descriptor, and the peer if it has sent anything."""
        broken: list[tuple[int, str | None]] = []
        while self._changes.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] != zmq.EVENT_DISCONNECTED:
                continue
            fd = event["value"]
            broken.append((fd, self._peer_by_fd.pop(fd, None)))
        return broken

    def _read_last_words(self, gone: int) -> bool:
        """Handle all queued messages of `gone` disconnected peers.

        Other peers may never stop sending, but their messages are interleaved: a full queue per peer is
        enough. Peers that have not sent anything yet count as one.
        """
        peers = gone + len(self._peer_by_fd) + 1
        return self._read_frames(peers * sockets.RECEIVE_QUEUE_MESSAGES_MAX, sys.maxsize)

    def _read_frames(self, messages_max: int, bytes_max: int) -> bool:
        """Handle queued messages up to both limits. Return True if there may be more."""
        for _ in range(messages_max):
            # Polling is cheaper than an exception: usually there is only one message.
            if not self._frames.poll(0):
                return False
            bytes_max -= self._receive(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            if bytes_max <= 0:
                break
        return True

    def _receive(self, frames: list[zmq.Frame]) -> int:
        """Handle one message. Return its size in bytes."""
        sender = frames[0].bytes.decode("ascii", "replace")
        fd = frames[-1].get(zmq.SRCFD)
        if isinstance(fd, int) and self._peer_by_fd.get(fd) != sender:
            self._peer_by_fd[fd] = sender
            self._connected.add(sender)
        body = [frame.bytes for frame in frames[1:]]
        self._handle(sender, body)
        return sum(map(len, body))

    def _handle(self, sender: str, body: list[bytes]) -> None:
        try:
            message, _ = wire.decode_to_gateway(body)
        except wire.WireError as error:
            self.errors["decode"] += 1
            log.warning("dropped a message from %s: %s", sender, error)
            return
        try:
            self._on_message(sender, message)
        except Exception:  # one bad message must not stop the others on this socket
            self.errors["handle"] += 1
            log.exception("failed to handle a %s from %s", type(message).__name__, sender)


# --- Peer process of a connection by its file descriptor: lookup, shutdown and kill ------------------
#
# ZeroMQ opens and closes descriptors on its own thread, so one may be closed already: all functions here
# handle that.

_PEER_CREDENTIALS = struct.Struct("iII")
"""Linux's `struct ucred`: process, user and group."""
_SOL_LOCAL, _LOCAL_PEERPID = 0, 2
"""Constants of macOS's sys/un.h, which Python lacks."""


def _opened(descriptor: int) -> socket.socket:
    """Return a duplicate of the connection, to be closed by the caller. The family does not matter here."""
    return socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM)


def peer_pid(descriptor: int) -> int | None:
    """Return the process id of the peer of a Unix socket; None if unknown.

    It comes from the operating system, not from the peer itself.
    """
    try:
        with _opened(descriptor) as connection:
            if isinstance(connection.getsockname(), tuple):
                return None  # an internet socket
            if sys.platform == "darwin":
                return connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID) or None
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    except OSError:
        return None
    pid: int = _PEER_CREDENTIALS.unpack(found)[0]
    return pid or None  # 0: a process in another namespace


def is_distant(descriptor: int) -> bool:
    """Return whether the connection uses internet protocols, so the peer may be on another machine."""
    try:
        with _opened(descriptor) as connection:
            return isinstance(connection.getsockname(), tuple)
    except OSError:
        return False


def cut(descriptor: int) -> None:
    """Shut down a connection below ZeroMQ, which cannot do that itself and finds it closed."""
    with contextlib.suppress(OSError), _opened(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def kill_peer(descriptors: Iterable[int], pid: int) -> bool:
    """Send SIGKILL to an unresponsive worker's process. Return whether that was done.

    `pid` is what the worker reported. It is killed only if one of `descriptors`, the worker's connections,
    was made by that process. Otherwise it is spared: the worker is out of service already, but killing an
    unrelated process cannot be undone.
    """
    if pid <= 1 or pid == os.getpid() or pid not in {peer_pid(descriptor) for descriptor in descriptors}:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
