"""The ROUTER socket on the event loop. Reads frames, decodes them, feeds the dispatcher; never raises out.

The socket's file descriptor is edge-triggered: after every read or send what is left must be looked for, or a
message lies unseen until the next one comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from broker.line.connections import kill_peer
from protocol import sockets, wire
from protocol.messages import Message, ToGateway

log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE = 256
"""Messages handled before other tasks of the loop get their turn."""


class Link:
    """The gateway's end of the line. `hear(sender, message)` and `lost(sender)` are called on the loop."""

    def __init__(self, endpoint: str, curve_keys: Path | None) -> None:
        """Bind. Raises `sockets.EndpointError` or `zmq.ZMQError`."""
        curve = sockets.Curve.load(curve_keys, "gateway") if curve_keys else None
        self.errors: Counter[str] = Counter()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorman = self._start_doorman(curve_keys) if curve_keys else None
        self._socket = sockets.bind_router(self._context, endpoint, curve)
        self._monitor = self._socket.get_monitor_socket()
        self._peer_by_fd: dict[int, str] = {}
        self._hear: Callable[[str, ToGateway], None] = lambda sender, message: None
        self._lost: Callable[[str], None] = lambda sender: None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _start_doorman(self, keys: Path) -> zmq.auth.thread.ThreadAuthenticator:
        """CURVE alone lets in whoever knows our public key; only holders of the worker key may come in."""
        doorman = zmq.auth.thread.ThreadAuthenticator(self._context)
        doorman.start()
        doorman.configure_curve(domain="roundhouse", location=str(keys))
        return doorman

    def start(self, hear: Callable[[str, ToGateway], None], lost: Callable[[str], None]) -> None:
        """Begin to read, on the running loop."""
        self._hear, self._lost = hear, lost
        self._loop = asyncio.get_running_loop()
        for socket in (self._socket, self._monitor):
            self._loop.add_reader(socket.fileno(), self._read)
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop reading and close the sockets; what is queued gets `sockets.LINGER_MS`."""
        if self._loop is not None:
            for socket in (self._socket, self._monitor):
                self._loop.remove_reader(socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()

    def send(self, peer: str, message: Message, media: Sequence[bytes] = ()) -> bool:
        """Hand a message to a worker's connection. False when there is none, or its queue is full.

        Raises `wire.WireError` for a message that cannot be sent to anyone.
        """
        frames = wire.encode(message, media)
        try:
            self._socket.send_multipart([peer.encode(), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.errors[f"send: {error}"] += 1
            return False
        finally:
            if self._loop is not None:
                self._loop.call_soon(self._read)
        return True

    def kill(self, peer: str, pid: int) -> bool:
        """End the process that this peer has named as its own, if it is. False where nothing was done."""
        return kill_peer([fd for fd, spoke in self._peer_by_fd.items() if spoke == peer], pid)

    def _read(self) -> None:
        # Whose connection broke is noted before the frames are read and judged after them: what a worker
        # managed to say before it died still counts.
        broken = self._broken()
        more = self._read_frames(None if broken else _MESSAGES_AT_ONCE)
        for fd, peer in broken:
            # Last words, perhaps its first ones too, were read only now, from a connection that is no more.
            if peer is None or self._peer_by_fd.get(fd) == peer:
                peer = self._peer_by_fd.pop(fd, None)
            # One that has spoken on another connection meanwhile is not lost: its Hello said what it is.
            if peer is not None and peer not in self._peer_by_fd.values():
                self._lost(peer)
        if more and self._loop is not None:
            self._loop.call_soon(self._read)

    def _broken(self) -> list[tuple[int, str | None]]:
        """Connections that broke since the last call: file descriptor and, once it has spoken, peer."""
        broken: list[tuple[int, str | None]] = []
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] != zmq.EVENT_DISCONNECTED:
                continue
            fd = event["value"]
            broken.append((fd, self._peer_by_fd.pop(fd, None)))
        return broken

    def _read_frames(self, most: int | None) -> bool:
        """Handle what has come, `most` messages of it. True when there may be more."""
        handled = 0
        while most is None or handled < most:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            handled += 1
            self._receive(frames)
        return True

    def _receive(self, frames: list[zmq.Frame]) -> None:
        sender = frames[0].bytes.decode("ascii", "replace")
        fd = frames[-1].get(zmq.SRCFD)
        if isinstance(fd, int) and self._peer_by_fd.get(fd) != sender:
            self._peer_by_fd[fd] = sender
        try:
            message, _ = wire.decode_to_gateway([frame.bytes for frame in frames[1:]])
        except wire.WireError as error:
            self.errors["decode"] += 1
            log.warning("dropped a message from %s: %s", sender, error)
            return
        try:
            self._hear(sender, message)
        except Exception:  # the boundary of a message: the others on this line still want to be heard
            self.errors["handle"] += 1
            log.exception("a %s from %s could not be handled", type(message).__name__, sender)
