"""The ROUTER socket on the event loop. Reads frames, decodes them, feeds the dispatcher; never raises out.

The socket's file descriptor is edge-triggered: after every read or send what is left must be looked for, or a
message lies unseen until the next one comes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from broker.line.connections import cut, is_distant, kill_peer
from broker.line.patience import Drop, Patience, cost
from protocol import sockets, wire
from protocol.messages import Accepted, Events, Message, Scored, ToGateway, tokens_told

log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE = 128
_BYTES_AT_ONCE = 256 * 1024
"""Messages, and bytes of them, that are read before other tasks of the loop get their turn."""

LEFT_ALONE = "left alone: it is not known to be that process"
FLOODING = "it sends far more than is of use"

Hear = Callable[[str, ToGateway], int]
"""(sender, message) -> how many of its deltas were of use."""
TurnAway = Callable[[str, str], None]
"""(peer, why): nothing is heard of it from now on."""


class Link:
    """The gateway's end of the line. All that it is to call is called on the loop."""

    def __init__(
        self,
        endpoint: str,
        curve_keys: Path | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        join: str = "",
    ) -> None:
        """Bind, to `join` as well if that is given. Raises `sockets.EndpointError` or `zmq.ZMQError`."""
        curve = sockets.Curve.load(curve_keys, "gateway") if curve_keys else None
        self.errors: Counter[str] = Counter()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorman = self._start_doorman(curve_keys) if curve_keys else None
        self._socket = sockets.bind_router(self._context, endpoint, curve, join)
        self._monitor = self._socket.get_monitor_socket()
        self._frames, self._changes = sockets.poller(self._socket), sockets.poller(self._monitor)
        self._peer_by_fd: dict[int, str] = {}
        self._patience = Patience()
        self._to_cut: set[int] = set()
        self._clock = clock
        self._hear: Hear = lambda sender, message: 0
        self._lost: Callable[[str], None] = lambda sender: None
        self._turn_away: TurnAway = lambda sender, why: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        """The next round of the loop will read."""

    def _start_doorman(self, keys: Path) -> zmq.auth.thread.ThreadAuthenticator:
        """CURVE alone lets in whoever knows our public key; only holders of the worker key may come in."""
        doorman = zmq.auth.thread.ThreadAuthenticator(self._context)
        doorman.start()
        doorman.configure_curve(domain="roundhouse", location=str(keys))
        return doorman

    def start(self, hear: Hear, lost: Callable[[str], None], turn_away: TurnAway) -> None:
        """Begin to read, on the running loop."""
        self._hear, self._lost, self._turn_away = hear, lost, turn_away
        self._loop = asyncio.get_running_loop()
        for socket in (self._socket, self._monitor):
            self._loop.add_reader(socket.fileno(), self._read_unless_due)
        self._read_soon()

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
            self._read_soon()
        return True

    def end(self, peer: str, pid: int) -> str:
        """What is done about a peer that hangs, in words. On this machine the process that it has named is
        killed, if it is the one at the other end. Of another machine only the connection is ours to end: a
        peer that comes to itself makes a new one, and introduces itself again."""
        connections = [fd for fd, spoke in self._peer_by_fd.items() if spoke == peer]
        if kill_peer(connections, pid):
            return "killed"
        distant = [fd for fd in connections if is_distant(fd)]
        for fd in distant:
            cut(fd)
        return "cut off" if distant else LEFT_ALONE

    def _read_soon(self) -> None:
        """Once in a round of the loop, however often it is asked for: whoever is to take what was heard gets
        a turn in between, and loses nothing for being served late."""
        if self._loop is not None and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._read)

    def _read_unless_due(self) -> None:
        if not self._is_due:
            self._read()

    def _read(self) -> None:
        self._is_due = False
        # Whose connection broke is noted before the frames are read and judged after them: what a worker
        # managed to say before it died still counts.
        broken = self._broken()
        if broken:
            more = self._read_last_words(len(broken))
        else:
            more = self._read_frames(_MESSAGES_AT_ONCE, _BYTES_AT_ONCE)
        for fd, peer in broken:
            # Last words, perhaps its first ones too, were read only now, from a connection that is no more.
            if peer is None or self._peer_by_fd.get(fd) == peer:
                peer = self._peer_by_fd.pop(fd, None)
            # One that has spoken on another connection meanwhile is not lost: its Hello said what it is.
            if peer is not None and peer not in self._peer_by_fd.values():
                self._lost(peer)
        # What is broken is closed: its descriptor may be a client's by now.
        for fd in self._to_cut.difference(fd for fd, _ in broken):
            cut(fd)
        self._to_cut.clear()
        if more:
            self._read_soon()

    def _broken(self) -> list[tuple[int, str | None]]:
        """Connections that broke since the last call: file descriptor and, once it has spoken, peer."""
        broken: list[tuple[int, str | None]] = []
        while self._changes.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] != zmq.EVENT_DISCONNECTED:
                continue
            fd = event["value"]
            broken.append((fd, self._peer_by_fd.pop(fd, None)))
        return broken

    def _read_last_words(self, gone: int) -> bool:
        """Handle all that so many peers have said who are gone. Others, who may never stop, take turns with
        them, those among them who have not spoken yet as one."""
        peers = gone + len(self._peer_by_fd) + 1
        return self._read_frames(peers * sockets.RECEIVE_QUEUE_MESSAGES_MAX, sys.maxsize)

    def _read_frames(self, messages_max: int, bytes_max: int) -> bool:
        """Handle what has come, so much of it. True when there may be more."""
        for _ in range(messages_max):
            # To ask costs less than to be told by an exception: mostly there is one message, and no second.
            if not self._frames.poll(0):
                return False
            bytes_max -= self._receive(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            if bytes_max <= 0:
                break
        return True

    def _receive(self, frames: list[zmq.Frame]) -> int:
        """Handle one message. How many bytes of it were read."""
        sender = frames[0].bytes.decode("ascii", "replace")
        fd = frames[-1].get(zmq.SRCFD)
        first = isinstance(fd, int) and self._peer_by_fd.get(fd) != sender
        if isinstance(fd, int):
            self._peer_by_fd[fd] = sender
        if self._patience.is_over(sender):
            self._drop(sender, fd, first=first)
            return 0
        body = [frame.bytes for frame in frames[1:]]
        size = sum(map(len, body))
        useful, deltas = self._hear_body(sender, body)
        if (spent := cost(size, deltas, useful)) and not self._patience.spend(sender, spent, self._clock()):
            self._drop(sender, fd, first=True)
        return size

    def _hear_body(self, sender: str, body: list[bytes]) -> tuple[int, int]:
        """How many deltas were of use, of how many."""
        try:
            message, _ = wire.decode_to_gateway(body)
        except wire.WireError as error:
            self.errors["decode"] += 1
            log.warning("dropped a message from %s: %s", sender, error)
            return 0, 0
        try:
            return self._hear(sender, message), _parts(message)
        except Exception:  # the boundary of a message: the others on this line still want to be heard
            self.errors["handle"] += 1
            log.exception("a %s from %s could not be handled", type(message).__name__, sender)
            return 0, 0

    def _drop(self, sender: str, fd: object, *, first: bool) -> None:
        """What one says that was turned away."""
        self.errors["flood"] += 1
        match self._patience.drop(sender, first=first):
            case Drop.TELL:
                self._turn_away(sender, FLOODING)
            case Drop.CUT if isinstance(fd, int):
                self._to_cut.add(fd)


def _parts(message: ToGateway) -> int:
    """How many things it says that can be of use."""
    match message:
        case Events():
            return len(message.deltas)
        case Scored():
            return len(message.tokens)
        case Accepted():
            return tokens_told(message)
        case _:
            return 0
