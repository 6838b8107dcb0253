"""Session: the worker's connection to one gateway, and the requests that came over it.

When the connection is lost, the requests run on for `orphan_s` (of the gateway's `Welcome`), without a
gateway: they are *orphaned*. What they produce is kept (`replay`). The next gateway gets a list of them with
the `Hello`, and its reply, `Adopt`, names those that it continues; from there on each message is sent once.
Between the two, the session is *muted*: it sends nothing about requests, because the gateway does not know
yet which of them are its own. Orphans that nobody adopts are ended:

* after `orphan_s` without a gateway or a reply;
* by a gateway that does not adopt them, or that is of an earlier version and adopts none;
* by a request of a gateway whose reply was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from protocol.messages import (
    Adopt,
    Cancel,
    Embed,
    Generate,
    Message,
    Rank,
    Request,
    Welcome,
)
from protocol.types import OrphanedRow
from worker.gateway.dealer import DealerLink
from worker.gateway.replay import REPLAY_S, ROW_MESSAGES, Replay
from worker.gateway.requests import Requests

log = logging.getLogger(__name__)

LOST_S = 1.0
"""Time without a connection until that is logged: at a stop, the gateway ends just before its workers."""

Introduce = Callable[[Sequence[OrphanedRow]], Iterable[Message]]
"""Rows that the worker still has -> what it says first on a connection."""


class GatewaySession:
    """A connection to a gateway, or to one after another. Used on the I/O thread only."""

    def __init__(
        self,
        line: DealerLink,
        introduce: Introduce,
        make_requests: Callable[[Callable[[Message], None]], Requests],
    ) -> None:
        """`make_requests`: makes the table of requests, given what sends their messages."""
        self.line = line
        self.requests = make_requests(self.post)
        self._introduce_with = introduce
        self._replay = Replay()
        self._now = 0.0
        self._gateway: str | None = None
        self._welcome_due = False
        self._lost_at: float | None = None
        self._orphan_s = 0.0
        self._orphaned_at: float | None = None
        """Since when its requests have no gateway."""
        self._is_muted = False

    @property
    def is_waited_for(self) -> bool:
        """Whether a gateway reads the output of some request."""
        return len(self.requests) > 0 and self.line.connected and self._orphaned_at is None

    # --- the connection ---

    def watch(self, now: float) -> None:
        """Follow changes of the connection, and the bounds of time. Call this on every turn."""
        self._now = now
        if self._lost_at is not None and now >= self._lost_at + LOST_S:
            self._lost_at = None
            log.warning("connection to the gateway lost; reconnecting")
        if self._orphaned_at is None:
            self._replay.trim(now - REPLAY_S)
        elif now - self._orphaned_at >= self._orphan_s:
            if len(self.requests):
                log.warning("%d requests end: no gateway has adopted them", len(self.requests))
            self._abandon()
        for is_there in self.line.changes():
            if is_there:
                self._lost_at = None
                self._introduce()
            else:
                self._gateway, self._lost_at = None, now
                self._orphan()

    def _orphan(self) -> None:
        self.line.forget()
        if not self._orphan_s:
            self._abandon()
        elif self._orphaned_at is None:
            self._orphaned_at = self._now
            if len(self.requests):
                log.info("%d requests run on without a gateway", len(self.requests))

    def _abandon(self) -> None:
        self.requests.abandon()
        self._replay.clear()
        self._orphaned_at, self._is_muted = None, False

    def _introduce(self) -> None:
        self._welcome_due = True
        rows = self._replay.rows() if self._orphan_s else []
        self._is_muted = bool(rows)
        if rows:
            self._orphaned_at = self._now if self._orphaned_at is None else self._orphaned_at
        else:
            self._orphaned_at = None
        self.line.send(*self._introduce_with(rows))

    # --- in ---

    def receive(self) -> Iterator[Message]:
        """Yield received messages, except those that the session has handled alone."""
        for message, media in self.line.receive():
            match message:
                case Welcome():
                    self._meet(message)
                case Adopt():
                    self._adopt(message)
                case Generate() | Embed() | Rank():
                    self._take(message, media)
                case Cancel():
                    self._replay.forget(message.id)
                    self.requests.cancel(message.id)
                case _:
                    yield message
        self.requests.pass_on()

    def _meet(self, message: Welcome) -> None:
        if self._gateway not in (None, message.incarnation):
            self._orphan()
            self._welcome_due = False  # that one has not answered, and this one knows nothing of the worker
        self._gateway = message.incarnation
        self._orphan_s = message.orphan_s
        if self._welcome_due:
            self._welcome_due = False
        else:
            self._introduce()
        if self._is_muted and not self._orphan_s:
            self._abandon()  # a gateway of an earlier version

    def _adopt(self, message: Adopt) -> None:
        if message.incarnation != self._gateway or not self._is_muted:
            return  # of another gateway, or not asked for
        adopted = {row.id: row for row in message.rows}
        for row in self._replay.rows():
            if row.id not in adopted:
                self._replay.forget(row.id)
                self.requests.cancel(row.id)
        log.info("%d requests go on with this gateway", len(adopted))
        self._orphaned_at, self._is_muted = None, False
        self.line.send(*self._replay.missing(adopted))

    def _take(self, request: Request, media: Sequence[bytes]) -> None:
        if self._is_muted and request.incarnation != self._gateway:
            return  # it was still on its way when the gateway died
        if self._is_muted:
            log.warning("%d requests end: the gateway has not adopted them", len(self.requests))
            self._abandon()
        if request.id not in self.requests:
            self._replay.open(request.id)
        self.requests.take(request, media)

    # --- out ---

    def post(self, message: Message) -> None:
        """Send a message, or keep it while its request has no gateway."""
        if isinstance(message, ROW_MESSAGES):
            self._replay.note(message, self._now)
            if self._orphaned_at is not None:
                self.requests.sent([message])
                return
        if self.line.connected:
            self.line.send(message)

    def send_all(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        self.requests.sent(self.line.send_all())
