"""The worker's end of the line to the gateway: one socket, and what is still to be said on it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import sockets, wire
from protocol.messages import Message

log = logging.getLogger(__name__)

_SENDS_AT_ONCE = 256
_RETRY_MS = 5


class Line:
    """Connects in the background, and again whenever the gateway was gone. For one thread."""

    def __init__(self, endpoint: str, incarnation: str, curve: sockets.Curve | None) -> None:
        """Raises `sockets.EndpointError`."""
        self.connected = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.connect_dealer(self._context, endpoint, incarnation, curve)
        self._monitor = self._socket.get_monitor_socket()
        self._frames, self._changes = sockets.poller(self._socket), sockets.poller(self._monitor)
        self._unsent: deque[Message] = deque()
        self._dropped = 0
        """Messages that were none."""

    def poller(self, *others: int) -> zmq.Poller:
        """Wakes when there is something to hear, or one of `others`, file descriptors, can be read."""
        return sockets.poller(self._socket, self._monitor, *others)

    def patience_ms(self, otherwise: int) -> int:
        """How long to poll: not long while a socket that was full is to be tried again."""
        return _RETRY_MS if self._unsent else otherwise

    def changes(self) -> Iterator[bool]:
        """Each time a gateway has come (True) or gone (False) since this was asked last."""
        while self._changes.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                yield True
            elif self.connected:
                log.warning("the gateway is gone; waiting for it to come back")
                self.connected = False
                yield False

    def receive(self) -> Iterator[tuple[Message, list[bytes]]]:
        """What has come, with its media."""
        while self._frames.poll(0):
            try:
                yield wire.decode_to_worker(self._socket.recv_multipart(zmq.NOBLOCK))
            except wire.WireError as error:
                self._dropped += 1
                log.warning("dropped a message, the %dth so far: %s", self._dropped, error)

    def say(self, *messages: Message) -> None:
        """In this order, behind what is still unsaid; `send` does it."""
        self._unsent.extend(messages)

    def forget(self) -> None:
        """Leave unsaid what was not sent yet."""
        self._unsent.clear()

    def send(self, more: Callable[[int], Iterable[Message]]) -> list[Message]:
        """Send what is to be said or else, if there is nothing, up to so many of `more`; what has been sent.

        What is said to nobody is not kept: a gateway that comes later hears the state anew.
        """
        if not self.connected:
            more(_SENDS_AT_ONCE)
            self.forget()
            return []
        if not self._unsent:
            self._unsent.extend(more(_SENDS_AT_ONCE))
        sent = []
        while self._unsent:
            try:
                self._socket.send_multipart(wire.encode(self._unsent[0]), zmq.NOBLOCK)
            except zmq.Again:
                break
            sent.append(self._unsent.popleft())
        return sent

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
