"""What the gateway knows and decides: fleet, flights and admission, driven by messages and the clock.

Pure: messages go out through a function that is handed in, time comes from one too. `link` feeds it what
workers send, `app` opens flights in it; a simulation can do both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from broker.admission import Admission
from broker.clearing import Clearing
from broker.fleet import Fleet, Verdict, Worker
from broker.inflight import Flight, Flights
from protocol.errors import Code, RequestError
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    CacheCleared,
    Cancel,
    ClearCache,
    Events,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Loading,
    Message,
    Ready,
    Rejected,
    Reused,
    ToGateway,
    Welcome,
)
from protocol.wire import WireError

log = logging.getLogger(__name__)

Send = Callable[[str, Message, Sequence[bytes]], bool]
"""(incarnation, message, media frames) -> whether it was handed to the connection. Raises `WireError`."""


class Dispatcher:
    """The gateway's state. One per process, used on the event loop only."""

    def __init__(
        self, *, incarnation: str, fleet: Fleet, admission: Admission, send: Send, clock: Callable[[], float]
    ) -> None:
        self.incarnation = incarnation
        self.fleet = fleet
        self.flights = Flights()
        self.admission = admission
        self.dropped: Counter[str] = Counter()
        self.stopping = False
        self._clearings: dict[str, Clearing] = {}
        self._send = send
        self._clock = clock

    # --- what clients want ---

    def find(self, model: str | None) -> Worker:
        """The worker a request for `model` would go to. Raises `RequestError`."""
        if self.stopping:
            raise RequestError(Code.SHUTTING_DOWN, retry_after_s=2.0)
        return self.fleet.find(model, self._clock())

    @contextmanager
    def board(
        self, worker: Worker, requests: Sequence[Generate], media: Sequence[bytes]
    ) -> Iterator[list[Flight]]:
        """Send what one client asks, a request for each choice, to a worker: all of them or none.

        While the context is open, their flights collect what comes back. Leaving it, however that comes
        about, frees the slots and tells the worker of those it is still at work on. Raises `RequestError`
        when the worker is too full or cannot be reached.
        """
        rows = worker.ready.running_max if worker.ready else 0
        self.admission.check(self.flights.aboard(worker.incarnation), rows, len(requests))
        now = self._clock()
        flights = [self.flights.open(request, worker.incarnation, now) for request in requests]
        try:
            for flight in flights:
                self._depart(flight, media)
            yield flights
        finally:
            for flight in flights:
                self._close(flight)

    def _close(self, flight: Flight) -> None:
        self.flights.close(flight)
        if flight.terminal is None:
            self._cancel(flight)
        elif isinstance(flight.terminal, Finished):
            self.admission.served(self._clock() - flight.opened_at)

    def _depart(self, flight: Flight, media: Sequence[bytes]) -> None:
        try:
            sent = self._send(flight.worker, flight.request, media)
        except WireError as error:  # a number beyond 64 bits in a tool's schema, say
            raise RequestError(Code.INVALID_REQUEST, f"The request cannot be passed on: {error}.") from None
        if not sent:
            raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=1.0)

    def _cancel(self, flight: Flight) -> None:
        self._send(flight.worker, Cancel(incarnation=self.incarnation, id=flight.id), ())

    @contextmanager
    def clear(self, model: str | None, id: str) -> Iterator[Clearing]:
        """Have every worker that serves `model` (None: every one that serves) forget its prefixes.

        While the context is open the answers are collected. Raises `RequestError` when nobody serves, or one
        who does cannot be reached.
        """
        self.find(model)
        serving = [worker for worker in self.fleet if worker.serves and model in (None, worker.model)]
        clearing = Clearing(id, {worker.incarnation: worker.model for worker in serving})
        self._clearings[id] = clearing
        try:
            for worker in serving:
                if not self._send(worker.incarnation, ClearCache(incarnation=self.incarnation, id=id), ()):
                    raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=1.0)
            yield clearing
        finally:
            del self._clearings[id]

    # --- what workers say ---

    def hear(self, sender: str, message: ToGateway) -> None:
        """One message from the peer whose connection is named `sender`."""
        if message.incarnation != sender:
            self.dropped["forged"] += 1
            return
        if isinstance(message, Hello):
            self._meet(message)
            return
        worker = self.fleet.get(sender)
        if worker is None:
            self._unknown(sender)
            return
        self.fleet.heard(worker, self._clock())
        if isinstance(message, Events):
            self._gain(message)
        else:
            self._handle(worker, message)

    def _meet(self, message: Hello) -> None:
        if message.version != PROTOCOL_VERSION:
            reason = f"it speaks protocol {message.version}, this gateway {PROTOCOL_VERSION}"
            log.error("worker %s (pid %d) turned away: %s", message.model, message.pid, reason)
            self._send(message.incarnation, Rejected(incarnation=self.incarnation, reason=reason), ())
            return
        # Who introduces itself again has lost its connection meanwhile, and dropped its rows.
        self.lost(message.incarnation, "came back on a new connection")
        self.fleet.hello(message, self._clock())
        log.info("worker for %s connected (pid %d)", message.model, message.pid)
        self._send(message.incarnation, self._welcome(), ())

    def _welcome(self) -> Welcome:
        return Welcome(incarnation=self.incarnation, version=PROTOCOL_VERSION)

    def _unknown(self, sender: str) -> None:
        # Either the last words of a worker that is dead (nobody hears the answer), or one that outlived the
        # gateway before us and introduces itself when it hears our incarnation.
        self.dropped["unknown_sender"] += 1
        self._send(sender, self._welcome(), ())

    def _handle(self, worker: Worker, message: ToGateway) -> None:
        now = self._clock()
        match message:
            case Heartbeat():
                self.fleet.heartbeat(worker, message, now)
            case Accepted() | Reused() | Finished() | Failed():
                self._pass_on(message)
            case Loading():
                self.fleet.loading(worker, message)
            case Ready():
                if worker.ready is None:
                    log.info("%s is ready: context %d tokens", message.model, message.context_length)
                self.fleet.ready(worker, message, now)
            case Goodbye():
                self.lost(worker.incarnation, f"said goodbye: {message.reason}")
            case CacheCleared():
                self._cleared(message)
            case _:
                self.dropped["unexpected"] += 1

    def _pass_on(self, message: Accepted | Reused | Finished | Failed) -> None:
        flight = self._flight(message.id, message.incarnation)
        if flight is None:
            return
        match message:
            case Accepted():
                flight.accept(message)
            case Reused():
                if not flight.reused(message):
                    self.dropped["unexpected"] += 1
            case _:
                flight.end(message)

    def _cleared(self, message: CacheCleared) -> None:
        clearing = self._clearings.get(message.id)
        if clearing is None or not clearing.answer(message):
            self.dropped["no_clearing"] += 1

    def _flight(self, id: str, worker: str) -> Flight | None:
        flight = self.flights.find(id, worker)
        if flight is None:
            self.dropped["no_flight"] += 1
        return flight

    def _gain(self, message: Events) -> None:
        now = self._clock()
        for delta in message.deltas:
            flight = self._flight(delta.id, message.incarnation)
            if flight is not None and flight.terminal is None and not flight.gain(delta, now):
                log.warning(
                    "%s failed after %d tokens: %s", flight.id, flight.tokens_emitted, flight.terminal
                )
                self._cancel(flight)

    # --- what the connection and the clock say ---

    def lost(self, incarnation: str, how: str = "connection lost") -> None:
        """The verdict *dead*: every flight aboard ends now."""
        worker = self.fleet.gone(incarnation)
        if worker is None:
            return
        aboard = self.flights.aboard(incarnation)
        log.warning(
            "worker for %s (pid %d) %s, %d requests aboard", worker.model, worker.pid, how, len(aboard)
        )
        for flight in aboard:
            flight.fail(Code.WORKER_CRASHED)
        for clearing in self._clearings.values():
            clearing.lose(incarnation)

    def sweep(self) -> None:
        """Called a few times a second: find workers that hang, and end what is aboard them."""
        for worker in self.fleet.sweep(self._clock()):
            verdict = worker.verdict or Verdict.SILENT
            aboard = self.flights.aboard(worker.incarnation)
            log.warning(
                "worker for %s (pid %d) is %s, %d requests aboard",
                worker.model, worker.pid, verdict.value, len(aboard),
            )  # fmt: skip
            for flight in aboard:
                flight.fail(
                    Code.WORKER_CRASHED, f"The worker fell {verdict.value} while it served this request."
                )
                self._cancel(flight)

    def stop(self) -> None:
        """No new requests from here on."""
        self.stopping = True

    def abandon(self) -> None:
        """End what is still in the air, in an orderly way, because the gateway goes."""
        for flight in self.flights:
            if flight.fail(Code.SHUTTING_DOWN):
                self._cancel(flight)
