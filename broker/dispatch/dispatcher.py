"""What the gateway knows and decides: fleet, flights and admission, driven by messages and the clock.

Pure: messages go out through a function that is handed in, time comes from one too. The line feeds it what
workers send, routes open flights in it; a simulation can do both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from broker.dispatch.admission import Admission
from broker.dispatch.catalogue import Catalogue, Tell
from broker.dispatch.clearing import Clearing, Clearings
from broker.dispatch.delivery import Delivery
from broker.dispatch.failover import Failover, Send, listed
from broker.dispatch.fleet import Fleet, Vacancy, Verdict, Worker
from broker.dispatch.flight import Flight
from broker.dispatch.flights import Flights
from broker.dispatch.history import History
from broker.dispatch.routing import Routing
from broker.dispatch.traffic import Traffic
from protocol.errors import Code, RequestError
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    CacheCleared,
    ClearCache,
    Draining,
    Encoded,
    Events,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Loading,
    Ready,
    Rejected,
    Request,
    Reused,
    Scored,
    ToGateway,
    Welcome,
)
from protocol.tasks import Task

log = logging.getLogger(__name__)

End = Callable[[str, int], str]
"""(incarnation, process id) -> what was done about a worker that hangs, in words: killed, where it is a
process of this machine and the one that it has named; cut off, where it may be of another."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that are waited: for another worker when one was lost, for a model that is loaded, for a worker
    that hangs before it is killed; and without a request before a model is unloaded, None: for ever."""

    failover_s: float = 120.0
    load_s: float = 300.0
    hung_s: float = 15.0
    unload_after_s: float | None = None


class Dispatcher:
    """The gateway's state. One per process, used on the event loop only."""

    def __init__(
        self,
        *,
        incarnation: str,
        fleet: Fleet,
        admission: Admission,
        send: Send,
        clock: Callable[[], float],
        timeouts: Timeouts | None = None,
        end: End | None = None,
        tell: Tell | None = None,
        routing: Routing | None = None,
        host: str = "",
    ) -> None:
        """`host`: the machine that this is; workers of others are no processes of the supervisor's."""
        self._timeouts = timeouts = timeouts or Timeouts()
        self.incarnation = incarnation
        self.fleet = fleet
        self.flights = Flights()
        self.traffic = Traffic()
        self.history = History(self.traffic, fleet, self.flights)
        self.failover = Failover(
            incarnation=incarnation,
            fleet=fleet,
            flights=self.flights,
            send=send,
            clock=clock,
            timeout_s=timeouts.failover_s,
            load_timeout_s=timeouts.load_s,
            routing=routing,
        )
        unload_after_s = timeouts.unload_after_s
        self.catalogue = Catalogue(
            fleet, self.flights, clock, unload_after_s=unload_after_s, tell=tell, host=host
        )
        self.admission = admission
        self.dropped: Counter[str] = Counter()
        self._delivery = Delivery(
            incarnation=incarnation,
            flights=self.flights,
            failover=self.failover,
            admission=admission,
            send=send,
            clock=clock,
            dropped=self.dropped,
            traffic=self.traffic,
        )
        self.stopping = False
        self._clearings = Clearings()
        self._send = send
        self._clock = clock
        self._end = end

    # --- what clients want ---

    def find(self, model: str | None, task: Task = "generate") -> Worker | Vacancy:
        """The worker a request for `model` would go to, or what it may wait for. Raises `RequestError`.

        `task`: which model is meant where none is named.
        """
        if self.stopping:
            raise RequestError(Code.SHUTTING_DOWN, retry_after_s=2.0)
        name = self.catalogue.resolve(model)
        return self.catalogue.vacancy(name) or self.fleet.find(name, self._clock(), self.failover.load, task)

    def check_ready(self) -> None:
        """Raises `RequestError` where no model serves, nor can be started."""
        names = list(self.catalogue.states) if self.catalogue.on_demand else [None]
        refusals = []
        for name in names:
            try:
                self.find(name)
            except RequestError as error:
                refusals.append(error)
        if len(refusals) == len(names):
            raise refusals[0]

    @contextmanager
    def board(
        self, found: Worker | Vacancy, requests: Sequence[Request], media: Sequence[bytes]
    ) -> Iterator[list[Flight]]:
        """Send what one client asks, a request for each choice, to a worker, or have it wait: all or none.

        While the context is open, their flights collect what comes back. Leaving it, however that comes
        about, frees the slots and tells the worker of those it is still at work on. Raises `RequestError`
        when the worker is too full or cannot be reached, and for a request that has brought it down before.
        """
        self.failover.suspects.check(requests, found.model)
        if isinstance(found, Vacancy) or not self._is_there(found):
            # It has been told to stop, was lost, or has come, since then; another may have its model.
            found = self.find(found.model)
        if isinstance(found, Worker):
            found = self.failover.steer(found, requests[0], lambda worker: self._has_room(worker, requests))
        assert found.ready is not None
        self.admission.check(self.present(found), found.ready, requests)
        now = self._clock()
        flights = [self.flights.open(request, found.model, now, media) for request in requests]
        aboard = False
        try:
            self.failover.depart(flights, found if isinstance(found, Worker) else None)
            aboard = True
            self.catalogue.update()
            yield flights
        finally:
            for flight in flights:
                if aboard:
                    self.traffic.ended(flight, self._clock())
                if flight.terminal is None:
                    self.failover.cancel(flight)
                self.flights.close(flight)
            self.failover.place()
            self.catalogue.update()

    def _has_room(self, worker: Worker, requests: Sequence[Request]) -> bool:
        ready = worker.ready
        return ready is not None and self.admission.has_room(self.present(worker), ready, requests)

    def _is_there(self, worker: Worker) -> bool:
        return worker.serves and self.fleet.get(worker.incarnation) is worker

    def present(self, found: Worker | Vacancy) -> list[Flight]:
        """Who has a place with this worker: those aboard, and those who wait for one of its model."""
        aboard = self.flights.aboard(found.incarnation) if isinstance(found, Worker) else []
        return [*aboard, *self.flights.waiting(found.model)]

    def give_up(self, flight: Flight, code: Code, message: str = "") -> None:
        """End a flight with an error of the gateway's own, and tell the worker."""
        if flight.fail(code, message):
            self.failover.cancel(flight)

    @contextmanager
    def clear(self, model: str | None, id: str) -> Iterator[Clearing]:
        """Have every worker that serves `model` (None: every one that serves) forget its prefixes.

        While the context is open the answers are collected. Raises `RequestError` when nobody serves, or one
        who does cannot be reached.
        """
        if model is not None:
            model = self.catalogue.resolve(model)
        self.fleet.find(model, self._clock(), self.failover.load)
        serving = [worker for worker in self.fleet if worker.serves and model in (None, worker.model)]
        awaited = {worker.incarnation: worker.model for worker in serving}
        with self._clearings.open(id, awaited) as clearing:
            for worker in serving:
                if not self._send(worker.incarnation, ClearCache(incarnation=self.incarnation, id=id), ()):
                    raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=1.0)
            yield clearing

    # --- what workers say ---

    def hear(self, sender: str, message: ToGateway) -> int:
        """One message from the peer whose connection is named `sender`. How much of it was of use: deltas,
        likelihoods or tokens of a prompt, vectors."""
        if message.incarnation != sender:
            self.dropped["forged"] += 1
            return 0
        if isinstance(message, Hello):
            self._meet(message)
            return 0
        worker = self.fleet.get(sender)
        if worker is None:
            self._unknown(sender)
            return 0
        gained = 0
        if self.fleet.heard(worker, self._clock()):
            self.failover.woke(worker)
        if isinstance(message, Events):
            self.fleet.advanced(worker, self._clock())
            gained = self._delivery.gain(worker, message)
        elif isinstance(message, Encoded):
            self.fleet.advanced(worker, self._clock())
            gained = self._delivery.encode(message)
        elif isinstance(message, Scored):
            self.fleet.advanced(worker, self._clock())
            gained = self._delivery.score(message)
        elif isinstance(message, Accepted):
            gained = self._delivery.accept(message)
        else:
            self._handle(worker, message)
        self.failover.place()
        return gained

    def _meet(self, message: Hello) -> None:
        if reason := self.fleet.objection(message):
            log.error("worker %s (pid %d) turned away: %s", message.model, message.pid, reason)
            self._send(message.incarnation, Rejected(incarnation=self.incarnation, reason=reason), ())
            return
        # Who introduces itself again has lost its connection meanwhile, and dropped its rows.
        self.lost(message.incarnation, "came back on a new connection", died=False)
        worker = self.fleet.hello(message, self._clock())
        self.traffic.worker(worker, self._clock(), "connected")
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
                self._delivery.reconcile(worker, message)
                self.fleet.heartbeat(worker, message, now)
            case Reused() | Finished() | Failed():
                self._delivery.pass_on(worker, message)
            case Loading():
                self.fleet.loading(worker, message)
            case Ready():
                if worker.ready is None:
                    self.traffic.worker(worker, now, "ready")
                    log.info("%s is ready: context %d tokens", message.model, message.context_length)
                self.fleet.ready(worker, message, now)
                self.catalogue.update()
            case Draining():
                log.info("worker for %s (pid %d) is told to stop", worker.model, worker.pid)
                worker.draining = True
            case Goodbye():
                self.lost(worker.incarnation, f"said goodbye: {message.reason}", died=False)
            case CacheCleared():
                self.failover.routing.affinity.forget(worker.incarnation)
                if not self._clearings.answer(message):
                    self.dropped["no_clearing"] += 1
            case _:
                self.dropped["unexpected"] += 1

    # --- what the connection and the clock say ---

    def lost(self, incarnation: str, how: str = "connection lost", *, died: bool = True) -> None:
        """The verdict *dead*: what was aboard flies on with another worker."""
        worker = self.fleet.gone(incarnation)
        if worker is None:
            return
        self.traffic.of(worker.model).losses["dead" if died else "left"] += 1
        self._ground(worker, how, died=died)
        self._clearings.lose(incarnation)
        self.catalogue.update()
        self.failover.place()

    def turn_away(self, peer: str, reason: str) -> None:
        """The line will not hear this peer any more, whoever it is: for those aboard it has died."""
        log.error("%s is turned away: %s", peer, reason)
        self._send(peer, Rejected(incarnation=self.incarnation, reason=reason), ())
        self.lost(peer, "is turned away")

    def _ground(self, worker: Worker, how: str, *, died: bool) -> None:
        aboard = self.flights.aboard(worker.incarnation)
        self.traffic.worker(worker, self._clock(), how)
        who = f"worker for {worker.model} (pid {worker.pid})"
        # One line says all that is known here; how the process ended is its supervisor's to tell.
        log.warning("%s %s after step %d, %s", who, how, worker.steps, listed(aboard))
        self.failover.ground(worker, died=died)

    def sweep(self) -> None:
        """Called a few times a second: find workers that hang, and who has waited for one too long."""
        now = self._clock()
        for worker in self.fleet.sweep(now):
            verdict = worker.verdict or Verdict.SILENT
            for flight in self.flights.aboard(worker.incarnation):
                self.failover.cancel(flight)
            self.traffic.of(worker.model).losses[verdict.value] += 1
            self._ground(worker, f"is {verdict.value}", died=True)
        if self._end is not None:
            for worker in self.fleet.hung(now, self._timeouts.hung_s):
                how = self._end(worker.incarnation, worker.pid)
                log.error("worker for %s (pid %d) hangs, and is %s", worker.model, worker.pid, how)
        self.catalogue.update()
        self.failover.sweep()
        self.history.tick(now)

    def stop(self) -> None:
        """No new requests from here on."""
        self.stopping = True

    def abandon(self) -> None:
        """End what is still in the air, in an orderly way, because the gateway goes."""
        for flight in self.flights:
            self.give_up(flight, Code.SHUTTING_DOWN)
