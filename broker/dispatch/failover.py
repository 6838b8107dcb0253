"""Brings flights aboard workers, and aboard the next one when theirs is lost. Pure.

A flight that has lost its worker waits, keeps what its client has, and flies on with the next worker of its
model that may take it (`berths`); how deaths are looked into is told in `suspects`. It gives up when no
worker has made a step with its model for too long.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from broker.dispatch.berths import Berth, departures
from broker.dispatch.fleet import Fleet, Worker
from broker.dispatch.flight import Flight
from broker.dispatch.flights import Flights
from broker.dispatch.routing import Desk, Routing
from broker.dispatch.suspects import GUILTY, REMAND_S, SETTLED_S, Standing, Suspects, mark_of
from protocol.about import about
from protocol.errors import Code, RequestError
from protocol.messages import Cancel, Message, Request
from protocol.wire import WireError

log = logging.getLogger(__name__)

MENDS_MAX = 8
"""So often in a row, without a token in between, a flight is sent again because of losses on the line."""
REPLACED = "Another model has taken the place of the one that began this answer."

_NAMED_MAX = 16

Send = Callable[[str, Message, Sequence[bytes]], bool]
"""(incarnation, message, media frames) -> whether it was handed to the connection. Raises `WireError`."""


class Failover:
    """Owns which flight is aboard which worker."""

    def __init__(
        self,
        *,
        incarnation: str,
        fleet: Fleet,
        flights: Flights,
        send: Send,
        clock: Callable[[], float],
        timeout_s: float,
        load_timeout_s: float,
        routing: Routing | None = None,
    ) -> None:
        """`timeout_s`: how long those wait that have lost their worker, `load_timeout_s`: newcomers."""
        self.suspects = Suspects(clock)
        self.routing = routing or Routing(clock)
        self.counts: Counter[str] = Counter()
        """What became of flights that lost their worker, or a part of what it said."""
        self.continued_by: Counter[str] = Counter()
        """How many went on with what another plan had begun, by the name of the one that did."""
        self._incarnation = incarnation
        self._fleet = fleet
        self._flights = flights
        self._send = send
        self._clock = clock
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._calm_since: dict[str, float] = {}
        """Models of which a worker serves: since when, and since the last loss of one."""

    # --- aboard ---

    def load(self, worker: Worker) -> tuple[bool, int]:
        """Whether it has no room for newcomers just now, and how many are aboard."""
        aboard, standing = self._flights.aboard(worker.incarnation), self.suspects.standing
        tries = any(standing(flight) is Standing.ALONE for flight in aboard)
        waiting = self._flights.waiting(worker.model)
        waits = tries or any(standing(f) in (Standing.SUSPECT, Standing.ALONE) for f in waiting)
        return waits, len(aboard)

    def steer(self, found: Worker, request: Request, has_room: Callable[[Worker], bool]) -> Worker:
        """Which of the workers that can do what this one can a new request goes to."""
        peers = [worker for worker in self._fleet if worker.serves and worker.stands_in_for(found)]
        if len(peers) < 2:
            return found
        open_ones = [worker for worker in peers if not self.load(worker)[0]] or peers
        return self.routing.newcomer(request, self._desks(list(filter(has_room, open_ones)) or open_ones))

    def _desks(self, workers: Sequence[Worker]) -> list[Desk]:
        """Of workers of one model."""
        return self.routing.desks([(each, self._flights.aboard(each.incarnation)) for each in workers])

    def depart(self, flights: Sequence[Flight], worker: Worker | None) -> None:
        """Newcomers board, all of them, or wait until that worker or another of its model takes them. None:
        there is no worker yet.

        Raises `RequestError` when it is gone, cannot be reached, or the request cannot be put on the wire.
        """
        gone = worker is not None and self._fleet.get(worker.incarnation) is not worker
        if gone or (worker is not None and not worker.serves):
            raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=1.0)
        for flight in flights:
            flight.suspect = self.suspects.deaths(flight) > 0
        if worker is None or self.load(worker)[0] or any(flight.suspect for flight in flights):
            self.place()
            return
        for flight in flights:
            try:
                sent = self._board(flight, worker)
            except WireError as error:  # a number beyond 64 bits in a tool's schema, say
                raise _cannot_be_sent(error) from None
            if not sent and not self._has_others(worker):
                raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=1.0)
            if not sent:  # it is about to be found lost, and another one takes them
                self._flights.leave(flight, flight.waiting_since)
        self.place()

    def _has_others(self, worker: Worker) -> bool:
        """Another one serves what it serves."""
        return any(
            other.serves and other.model == worker.model for other in self._fleet if other is not worker
        )

    def _board(self, flight: Flight, worker: Worker) -> bool:
        message = self._flights.board(flight, worker.incarnation, self._clock())
        before = flight.continued_by
        flight.flies_by(worker.identity, worker.plan)
        if flight.continued_by != before:
            self.continued_by[flight.continued_by] += 1
        flight.limit(worker.ready.context_length if worker.ready else 0)
        self.routing.boarded(flight, worker)
        return self._send(worker.incarnation, message, flight.media)

    def place(self) -> None:
        """Everybody who waits and may board, does. To be called when something has changed."""
        waiting = self._flights.waiting()
        if not waiting:
            return
        berths = [berth for model in {flight.model for flight in waiting} for berth in self._berths(model)]
        for flight, berth in departures(waiting, berths, self.suspects.standing, self.routing.pick):
            try:
                sent = self._board(flight, berth.worker)
            except WireError as error:
                flight.fail(Code.INVALID_REQUEST, _cannot_be_sent(error).message)
                continue
            if not sent:
                berths.remove(berth)
                self._flights.leave(flight, flight.waiting_since)
            elif flight.legs > 1:
                self.counts["resumed"] += 1
                log.info("%s goes on behind %d tokens", flight.id, flight.progress, extra=about(flight.id))
        self._fail_strangers()

    def _berths(self, model: str) -> list[Berth]:
        settled = self._calm_s(model) >= SETTLED_S
        serving = [worker for worker in self._fleet if worker.serves and worker.model == model]
        return [
            Berth.of(
                desk,
                self._flights.aboard(desk.worker.incarnation),
                self.suspects.standing,
                settled=settled,
            )
            for desk in self._desks(serving)
        ]

    def _fail_strangers(self) -> None:
        """Nobody can finish what another model began, though it now has that one's name."""
        for flight in self._flights.waiting():
            serving = [worker for worker in self._fleet if worker.serves and worker.model == flight.model]
            if serving and not any(_may_finish(worker, flight) for worker in serving):
                flight.fail(Code.WORKER_UNAVAILABLE, REPLACED)

    # --- and off again ---

    def cancel(self, flight: Flight) -> None:
        """Its worker need not go on with it."""
        if flight.leg is not None:
            self._send(flight.leg.worker, Cancel(incarnation=self._incarnation, id=flight.leg.id), ())

    def ground(self, worker: Worker, *, died: bool) -> None:
        """A worker is lost. `died`: not by its own decision, and those aboard may have had a part in it."""
        aboard = self._flights.aboard(worker.incarnation)
        self.counts["grounded"] += len(aboard)
        self._calm_since.pop(worker.model, None)
        if died and worker.ready is not None:
            self.suspects.died(worker.incarnation, worker.model, aboard)
        for flight in aboard:
            self._flights.leave(flight, self._clock())

    def woke(self, worker: Worker) -> None:
        """It was taken for lost, and was not: nobody has brought it down."""
        self.suspects.withdraw(worker.incarnation)

    def take_back(self, flight: Flight, why: str) -> None:
        """Something of this leg was lost on the line: another one begins where the client is."""
        log.warning("%s is sent again: %s", flight.id, why, extra=about(flight.id))
        self.cancel(flight)
        self._flights.leave(flight, self._clock())
        flight.mends += 1
        if flight.mends > MENDS_MAX:
            flight.fail(Code.INTERNAL_ERROR, f"The stream was damaged on its way again and again: {why}.")

    def gained(self, flight: Flight) -> None:
        """A suspect has got on."""
        if flight.proven:
            self.suspects.clear(flight)

    def ended(self, flight: Flight) -> None:
        """By its worker's word, with which that has outlived it."""
        if flight.suspect:
            self.suspects.clear(flight)

    # --- what the clock says ---

    def sweep(self) -> None:
        """Who has waited long enough for a worker, or for its verdict. To be called now and then."""
        for worker in self._fleet:
            if worker.serves:
                self._calm_since.setdefault(worker.model, self._clock())
        self.place()
        self._judge()
        self._give_up()

    def _calm_s(self, model: str) -> float:
        return self._clock() - self._calm_since.get(model, self._clock())

    def _judge(self) -> None:
        """Those who await a verdict have it when a worker has lived without them for long enough."""
        held = [f for f in self._flights.waiting() if self.suspects.standing(f) is Standing.HELD]
        guilty = {mark_of(flight) for flight in held if self._calm_s(flight.model) >= REMAND_S}
        for flight in held:
            if mark_of(flight) in guilty:
                log.error("%s has brought its worker down repeatedly", flight.id, extra=about(flight.id))
                self.suspects.convict(flight)
                flight.fail(Code.WORKER_CRASHED, GUILTY)

    def _give_up(self) -> None:
        """End those who wait for a verdict, or for a worker of their model to make a step, for too long."""
        now = self._clock()
        loaded = {worker.model for worker in self._fleet if worker.fit}
        for flight in self._flights.waiting():
            since = flight.waiting_since
            if self.suspects.standing(flight) is not Standing.HELD:
                since = max(since, self._fleet.models[flight.model].advanced_at)
            waited_s = now - since
            if not flight.legs and flight.model not in loaded:
                if waited_s > self._load_timeout_s:
                    message = f"The model `{flight.model}` was not ready within {self._load_timeout_s:g} s."
                    flight.fail(Code.MODEL_LOADING, message)
            elif waited_s > self._timeout_s:
                message = f"The worker was lost, and no other has taken over within {self._timeout_s:g} s."
                flight.fail(Code.WORKER_UNAVAILABLE, message)


def _may_finish(worker: Worker, flight: Flight) -> bool:
    return flight.goes_on_with(worker.identity, stands_in=worker.stands_in)


def listed(aboard: Sequence[Flight]) -> str:
    """Who is aboard, how many tokens each has, and who is under suspicion, for the log."""
    named = [
        f"{f.id} ({len(f.tokens)} tokens{', suspected' if f.suspect else ''})" for f in aboard[:_NAMED_MAX]
    ]
    names = f": {', '.join(named)}" if named else ""
    more = f" and {len(aboard) - _NAMED_MAX} more" if len(aboard) > _NAMED_MAX else ""
    count = "1 request" if len(aboard) == 1 else f"{len(aboard)} requests"
    return f"{count} aboard{names}{more}"


def _cannot_be_sent(error: WireError) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, f"The request cannot be passed on: {error}.")
