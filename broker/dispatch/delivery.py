"""What workers say of requests, on its way to their flights. Pure.

The line may lose a message, or bring it twice: what does not fit is counted, and a flight that lacks
something is taken back (`failover`). Nothing is kept here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from broker.dispatch import reconcile
from broker.dispatch.admission import Admission
from broker.dispatch.failover import Failover, Send
from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight, Gain
from broker.dispatch.flights import Flights
from broker.dispatch.traffic import Traffic
from protocol.about import about
from protocol.messages import (
    Accepted,
    Cancel,
    Encoded,
    Events,
    Failed,
    Finished,
    Heartbeat,
    Reused,
    Scored,
    tokens_told,
)
from protocol.parts import Delta
from protocol.tasks import runs_nothing

log = logging.getLogger(__name__)


class Delivery:
    """Hands messages to the flights they are about."""

    def __init__(
        self,
        *,
        incarnation: str,
        flights: Flights,
        failover: Failover,
        admission: Admission,
        send: Send,
        clock: Callable[[], float],
        dropped: Counter[str],
        traffic: Traffic,
    ) -> None:
        """`dropped`: where it is counted what did not fit."""
        self._incarnation = incarnation
        self._flights = flights
        self._failover = failover
        self._admission = admission
        self._send = send
        self._clock = clock
        self._dropped = dropped
        self._traffic = traffic

    def accept(self, message: Accepted) -> int:
        """A request is well-formed. How many tokens of its prompt were told, if that was news."""
        flight = self._flight(message.id, message.incarnation)
        is_news = flight is not None and flight.accept(message)
        return tokens_told(message) if is_news else 0

    def pass_on(self, worker: Worker, message: Reused | Finished | Failed) -> None:
        """How one request stands, or how it has ended."""
        flight = self._flight(message.id, message.incarnation)
        if flight is None:
            return
        match message:
            case Reused():
                if not flight.reused(message):
                    self._dropped["unexpected"] += 1
                elif flight.legs == 1:
                    self._traffic.reused(flight)
            case Finished() if flight.terminal is None and flight.lacks(message):
                self._dropped["gap"] += 1
                self._failover.take_back(flight, f"its end came behind {flight.progress} tokens")
            case _:
                if flight.end(message):
                    self._failover.ended(flight)
                    if isinstance(message, Finished):
                        self._finished(worker, flight, message)

    def _finished(self, worker: Worker, flight: Flight, message: Finished) -> None:
        self._failover.routing.finished(flight, worker, message)
        # What is only counted says nothing of how long those take that are run.
        if not runs_nothing(flight.request):
            self._admission.served(self._clock() - flight.opened_at)

    def score(self, message: Scored) -> int:
        """How likely a part of a prompt is. How many of its tokens are news."""
        flight = self._flight(message.id, message.incarnation)
        if flight is None:
            return 0
        match flight.score(message, self._clock()):
            case Gain.TAKEN:
                if flight.suspect:
                    self._failover.gained(flight)
                return len(message.tokens)
            case Gain.DOUBLE:
                self._dropped["double"] += 1
            case Gain.GAP:
                self._dropped["gap"] += 1
                self._failover.take_back(flight, f"of its prompt, token {message.first} came before its time")
        return 0

    def encode(self, message: Encoded) -> int:
        """The numbers of some of a request's texts. How many of them are news."""
        flight = self._flight(message.id, message.incarnation)
        if flight is None:
            return 0
        match flight.encode(message, self._clock()):
            case Gain.TAKEN:
                if flight.suspect:
                    self._failover.gained(flight)
                return len(message.places)
            case Gain.DOUBLE:
                self._dropped["double"] += 1
            case Gain.GAP:
                self._dropped["gap"] += 1
                self._failover.take_back(flight, f"part {message.sequence} came before its time")
            case Gain.BEYOND:
                self._dropped["beyond"] += 1
                self._failover.take_back(flight, "it got numbers of texts that it has not, or has them of")
        return 0

    def gain(self, worker: Worker, message: Events) -> int:
        """What requests gained in a step. How many of them did."""
        now, taken, firsts, tokens = self._clock(), 0, 0, 0
        for delta in message.deltas:
            flight = self._flight(delta.id, message.incarnation)
            if flight is None or flight.terminal is not None:
                continue
            gain = flight.gain(delta, now)
            if gain is not Gain.TAKEN:
                self._not_taken(flight, delta, gain)
                continue
            taken += 1
            tokens += len(delta.tokens)
            if not delta.sequence:
                firsts += 1
                if flight.legs == 1:
                    self._traffic.began(flight, now)
            if flight.suspect:
                self._failover.gained(flight)
        if taken:
            self._traffic.stepped(worker, now, pieces=taken, firsts=firsts, tokens=tokens)
        return taken

    def _not_taken(self, flight: Flight, delta: Delta, gain: Gain) -> None:
        match gain:
            case Gain.DOUBLE:
                self._dropped["double"] += 1
            case Gain.GAP:
                self._dropped["gap"] += 1
                self._failover.take_back(flight, f"delta {delta.sequence} came before its time")
            case Gain.BEYOND:
                self._dropped["beyond"] += 1
                self._failover.take_back(flight, f"it got more than {flight.tokens_max} tokens")
            case _:
                log.warning("%s: its client does not read", flight.id, extra=about(flight.id))
                self._failover.cancel(flight)

    def reconcile(self, worker: Worker, beat: Heartbeat) -> None:
        """Flights that the worker ought to have and has not, and rows that it has and ought not to."""
        name = worker.incarnation
        for flight in reconcile.lost(worker, beat, self._flights.aboard(name), self._clock()):
            self._dropped["lost"] += 1
            self._failover.take_back(flight, "its worker does not know it")
        for row in reconcile.strays(worker, beat, self._flights.legs(name)):
            self._dropped["stray"] += 1
            self._send(name, Cancel(incarnation=self._incarnation, id=row), ())

    def _flight(self, id: str, worker: str) -> Flight | None:
        flight = self._flights.find(id, worker)
        if flight is None:
            self._dropped["no_flight"] += 1
        return flight
