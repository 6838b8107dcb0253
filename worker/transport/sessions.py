"""Sessions: the connections of a worker to its gateway, and to earlier gateways that still have requests.

A gateway that is replaced while it runs keeps the requests that came to it (`HandedOver`), and its successor
gets all later ones. So a worker may have several sessions at once: the current one, and the former ones, each
until its gateway closes it. A message about a request goes to the session that it came over; what describes
the worker goes to all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import zmq
from msgspec.structs import replace

from protocol import sockets
from protocol.messages import HandedOver, Heartbeat, Message, Rejected, StepOutputs, Welcome
from worker.transport.replay import ROW_MESSAGES
from worker.transport.session import GatewaySession

log = logging.getLogger(__name__)

FORMER_MAX = 4
"""Maximum number of former gateways; beyond it, the requests of the first one end."""

Open = Callable[[str], GatewaySession]
"""Opens a session with the gateway at an endpoint; empty: the configured one. Raises `EndpointError`."""


class GatewaySessions:
    """All sessions of a worker. Used on the I/O thread only."""

    def __init__(self, open: Open) -> None:
        """Connect in the background. Raises `sockets.EndpointError`."""
        self._open = open
        self.current = open("")
        self._former: list[GatewaySession] = []
        self._left = ""
        """Incarnation of the gateway that has handed over last; each does so once."""
        self._joined = ""
        """Endpoint of the former gateway that its successor has named last."""
        self._poller: zmq.Poller | None = None

    def __iter__(self) -> Iterator[GatewaySession]:
        return iter([self.current, *self._former])

    @property
    def count(self) -> int:
        """Number of requests."""
        return sum(len(session.requests) for session in self)

    @property
    def preparing(self) -> int:
        """Number of requests that have not reached the model thread yet."""
        return sum(session.requests.preparing for session in self)

    @property
    def are_waited_for(self) -> bool:
        """Whether a gateway reads the output of some request."""
        return any(session.requests and session.has_gateway for session in self)

    @property
    def is_backlogged(self) -> bool:
        """Whether messages wait for a full socket."""
        return any(session.line.is_backlogged for session in self)

    def poll(self, timeout_ms: int, wakeup: int) -> None:
        """Wait for messages, changes of a connection, or the file descriptor `wakeup`."""
        if self._poller is None:
            readable = [socket for session in self for socket in session.line.readable]
            self._poller = sockets.poller(*readable, wakeup)
        self._poller.poll(min(session.line.patience_ms(timeout_ms) for session in self))

    def watch(self, now: float) -> None:
        """Follow the connections, and close those whose gateway is gone. Call this on every turn."""
        for session in self:
            session.watch(now)
            if session.is_closed:
                log.info("an earlier gateway has ended, with %d requests left", len(session.requests))
                self._drop(session)

    def receive(self, now: float) -> Iterator[Message]:
        """Yield received messages, except those about sessions and requests."""
        for session in self:
            for message in session.receive():
                match message:
                    case HandedOver() if message.incarnation != self._left:
                        self._left = message.incarnation
                        self._hand_over(session, now)
                    case HandedOver():
                        log.warning("the gateway hands over for a second time: ignored")
                    case Welcome():
                        self._join(message.predecessor, now)
                    case Rejected() if session.is_former:
                        session.is_closed = True
                    case _:
                        yield message
            session.requests.pass_on()

    def _hand_over(self, session: GatewaySession, now: float) -> None:
        log.info("the gateway hands over to another one, and keeps %d requests", len(session.requests))
        session.become_former(now)
        self._former.append(session)
        self.current = self._open("")
        self._poller = None
        if len(self._former) > FORMER_MAX:
            self._drop(self._former[0])

    def _join(self, endpoint: str, now: float) -> None:
        """Connect to a former gateway as well, unless there is a session with it."""
        if endpoint == self._joined or self._former or not endpoint.startswith("ipc://"):
            return
        try:
            session = self._open(endpoint)
        except sockets.EndpointError as error:
            log.warning("cannot connect to an earlier gateway: %s", error)
            return
        self._joined = endpoint
        session.become_former(now)
        self._former.append(session)
        self._poller = None

    def _drop(self, session: GatewaySession) -> None:
        self._former.remove(session)
        self._poller = None
        session.close()

    # --- out ---

    def post(self, message: Message) -> None:
        """Send a message to the gateway that it concerns, or to all."""
        if not self._former:
            self.current.post(message)
        elif isinstance(message, StepOutputs):
            for session in self:
                if deltas := [delta for delta in message.deltas if delta.id in session.requests]:
                    session.post(replace(message, deltas=deltas))
        elif isinstance(message, ROW_MESSAGES) and not isinstance(message, StepOutputs):
            id = message.id
            next((session for session in self if id in session.requests), self.current).post(message)
        else:
            for session in self:
                session.post(_own(message, session))

    def send_all(self) -> None:
        """Send what is queued, as far as the sockets take it."""
        for session in self:
            session.send_all()

    def close(self) -> None:
        for session in self:
            session.line.close()


def _own(message: Message, session: GatewaySession) -> Message:
    """Return a message about the worker without the requests of other gateways, which look like strays."""
    if not isinstance(message, Heartbeat):
        return message
    return replace(message, rows=[row for row in message.rows if row.id in session.requests])
