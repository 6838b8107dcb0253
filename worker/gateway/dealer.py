"""The worker's DEALER socket to the gateway, with a queue of unsent messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import sockets, wire
from protocol.messages import Message

log = logging.getLogger(__name__)

_RECEIVES_AT_ONCE = 256
_RETRY_MS = 5


class DealerLink:
    """DEALER socket that connects in the background and reconnects when needed. For one thread."""

    def __init__(self, endpoint: str, incarnation: str, curve: sockets.Curve | None) -> None:
        """Raises `sockets.EndpointError`."""
        self.connected = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.connect_dealer(self._context, endpoint, incarnation, curve)
        self._monitor = self._socket.get_monitor_socket()
        self._frames, self._changes = sockets.poller(self._socket), sockets.poller(self._monitor)
        self._unsent: deque[Message] = deque()
        self._dropped = 0
        """Number of invalid messages."""

    @property
    def readable(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What is readable when there are messages or changes of the connection."""
        return self._socket, self._monitor

    def patience_ms(self, otherwise: int) -> int:
        """Return the poll timeout: `otherwise`, or less while messages wait for a full socket."""
        return _RETRY_MS if self._unsent else otherwise

    def changes(self) -> Iterator[bool]:
        """Yield each connect (True) and disconnect (False) of the gateway since the last call."""
        while self._changes.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                yield True
            elif self.connected:
                self.connected = False
                yield False

    def receive(self) -> Iterator[tuple[Message, list[bytes]]]:
        """Yield received messages with their media, at most 256, so that heartbeats are not delayed.

        Further messages wake the poller again.
        """
        for _ in range(_RECEIVES_AT_ONCE):
            if not self._frames.poll(0):
                return
            try:
                yield wire.decode_to_worker(self._socket.recv_multipart(zmq.NOBLOCK))
            except wire.WireError as error:
                self._dropped += 1
                log.warning("dropped an invalid message (%d so far): %s", self._dropped, error)

    def send(self, *messages: Message) -> None:
        """Queue `messages` behind unsent ones; `send_all` sends them."""
        self._unsent.extend(messages)

    def forget(self) -> None:
        """Drop all unsent messages."""
        self._unsent.clear()

    @property
    def is_backlogged(self) -> bool:
        """Whether messages wait for a full socket."""
        return bool(self._unsent)

    def send_all(self) -> list[Message]:
        """Send the queued messages, as far as the socket takes them; return those sent.

        Without a connection they are dropped: a gateway that connects later receives the current state.
        """
        if not self.connected:
            self.forget()
            return []
        sent = []
        while self._unsent:
            try:
                self._socket.send_multipart(wire.encode(self._unsent[0]), zmq.NOBLOCK)
            except zmq.Again:
                break
            sent.append(self._unsent.popleft())
        return sent

    def close(self) -> None:
        """Close the socket; what is queued gets `sockets.LINGER_MS`."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
