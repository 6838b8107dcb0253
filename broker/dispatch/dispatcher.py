"""What the gateway knows and decides: fleet, flights and admission, driven by messages and the clock.

Pure: messages go out through a function that is handed in, time comes from one too. `link` feeds it what
workers send, `app` opens flights in it; a simulation can do both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from broker.dispatch import reconcile
from broker.dispatch.admission import Admission
from broker.dispatch.catalogue import Catalogue, Tell
from broker.dispatch.clearing import Clearing
from broker.dispatch.failover import Failover, Send, listed
from broker.dispatch.fleet import Fleet, Vacancy, Verdict, Worker
from broker.dispatch.flights import Flight, Flights, Gain
from protocol import logs
from protocol.errors import Code, RequestError
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    CacheCleared,
    Cancel,
    ClearCache,
    Draining,
    Events,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Loading,
    Ready,
    Rejected,
    Reused,
    ToGateway,
    Welcome,
)

log = logging.getLogger(__name__)
log.addFilter(logs.Sparse())  # workers come and go a few times a minute, or something is wrong

MODELS_MAX = 256
"""Models that workers may name in the life of a gateway: it remembers them all."""

Kill = Callable[[int], None]
"""End the process with this id, which belongs to a worker of this machine that hangs."""


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
        failover_timeout_s: float = 120.0,
        load_timeout_s: float = 300.0,
        hung_timeout_s: float = 15.0,
        unload_after_s: float | None = None,
        kill: Kill | None = None,
        tell: Tell | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.fleet = fleet
        self.flights = Flights()
        self.failover = Failover(
            incarnation=incarnation,
            fleet=fleet,
            flights=self.flights,
            send=send,
            clock=clock,
            timeout_s=failover_timeout_s,
            load_timeout_s=load_timeout_s,
        )
        self.catalogue = Catalogue(fleet, self.flights, clock, unload_after_s=unload_after_s, tell=tell)
        self.admission = admission
        self.dropped: Counter[str] = Counter()
        self.stopping = False
        self._clearings: dict[str, Clearing] = {}
        self._send = send
        self._clock = clock
        self._hung_timeout_s = hung_timeout_s
        self._kill = kill

    # --- what clients want ---

    def find(self, model: str | None) -> Worker | Vacancy:
        """The worker a request for `model` would go to, or what it may wait for. Raises `RequestError`."""
        if self.stopping:
            raise RequestError(Code.SHUTTING_DOWN, retry_after_s=2.0)
        name = self.catalogue.resolve(model)
        return self.catalogue.vacancy(name) or self.fleet.find(name, self._clock(), self.failover.load)

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
        self, found: Worker | Vacancy, requests: Sequence[Generate], media: Sequence[bytes]
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
        assert found.ready is not None
        self.admission.check(self.present(found), found.ready, requests)
        now = self._clock()
        flights = [self.flights.open(request, found.model, now, media) for request in requests]
        try:
            self.failover.depart(flights, found if isinstance(found, Worker) else None)
            self.catalogue.update()
            yield flights
        finally:
            for flight in flights:
                if flight.terminal is None:
                    self.failover.cancel(flight)
                self.flights.close(flight)
            self.failover.place()
            self.catalogue.update()

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
        if self.fleet.heard(worker, self._clock()):
            self.failover.woke(worker)
        if isinstance(message, Events):
            self._gain(worker, message)
        else:
            self._handle(worker, message)
        self.failover.place()

    def _meet(self, message: Hello) -> None:
        if message.version != PROTOCOL_VERSION:
            reason = f"it speaks protocol {message.version}, this gateway {PROTOCOL_VERSION}"
            self._turn_away(message, reason)
            return
        if len(self.fleet.models) >= MODELS_MAX and message.model not in self.fleet.models:
            self._turn_away(message, f"this gateway has met {MODELS_MAX} models already")
            return
        # Who introduces itself again has lost its connection meanwhile, and dropped its rows.
        self.lost(message.incarnation, "came back on a new connection", died=False)
        self.fleet.hello(message, self._clock())
        log.info("worker for %s connected (pid %d)", message.model, message.pid)
        self._send(message.incarnation, self._welcome(), ())

    def _turn_away(self, message: Hello, reason: str) -> None:
        log.error("worker %s (pid %d) turned away: %s", message.model, message.pid, reason)
        self._send(message.incarnation, Rejected(incarnation=self.incarnation, reason=reason), ())

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
                self._reconcile(worker, message)
                self.fleet.heartbeat(worker, message, now)
            case Accepted() | Reused() | Finished() | Failed():
                self._pass_on(message)
            case Loading():
                self.fleet.loading(worker, message)
            case Ready():
                if worker.ready is None:
                    log.info("%s is ready: context %d tokens", message.model, message.context_length)
                self.fleet.ready(worker, message, now)
                self.catalogue.update()
            case Draining():
                log.info("worker for %s (pid %d) is told to stop", worker.model, worker.pid)
                worker.draining = True
            case Goodbye():
                self.lost(worker.incarnation, f"said goodbye: {message.reason}", died=False)
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
            case Finished() if flight.terminal is None and flight.lacks(message):
                self.dropped["gap"] += 1
                self.failover.take_back(flight, f"its end came behind {len(flight.tokens)} tokens")
            case _:
                if flight.end(message):
                    self.failover.ended(flight)
                    if isinstance(message, Finished):
                        self.admission.served(self._clock() - flight.opened_at)

    def _cleared(self, message: CacheCleared) -> None:
        clearing = self._clearings.get(message.id)
        if clearing is None or not clearing.answer(message):
            self.dropped["no_clearing"] += 1

    def _flight(self, id: str, worker: str) -> Flight | None:
        flight = self.flights.find(id, worker)
        if flight is None:
            self.dropped["no_flight"] += 1
        return flight

    def _gain(self, worker: Worker, message: Events) -> None:
        now = self._clock()
        self.fleet.advanced(worker, now)
        for delta in message.deltas:
            flight = self._flight(delta.id, message.incarnation)
            if flight is None or flight.terminal is not None:
                continue
            match flight.gain(delta, now):
                case Gain.TAKEN:
                    if flight.suspect:
                        self.failover.gained(flight)
                case Gain.DOUBLE:
                    self.dropped["double"] += 1
                case Gain.GAP:
                    self.dropped["gap"] += 1
                    self.failover.take_back(flight, f"delta {delta.sequence} came before its time")
                case Gain.OVER:
                    log.warning("%s: its client does not read", flight.id)
                    self.failover.cancel(flight)

    def _reconcile(self, worker: Worker, beat: Heartbeat) -> None:
        """Flights that the worker ought to have and has not, and rows that it has and ought not to."""
        name = worker.incarnation
        for flight in reconcile.lost(worker, beat, self.flights.aboard(name), self._clock()):
            self.dropped["lost"] += 1
            self.failover.take_back(flight, "its worker does not know it")
        for row in reconcile.strays(worker, beat, self.flights.legs(name)):
            self.dropped["stray"] += 1
            self._send(name, Cancel(incarnation=self.incarnation, id=row), ())

    # --- what the connection and the clock say ---

    def lost(self, incarnation: str, how: str = "connection lost", *, died: bool = True) -> None:
        """The verdict *dead*: what was aboard flies on with another worker."""
        worker = self.fleet.gone(incarnation)
        if worker is None:
            return
        self._ground(worker, how, died=died)
        for clearing in self._clearings.values():
            clearing.lose(incarnation)
        self.catalogue.update()
        self.failover.place()

    def _ground(self, worker: Worker, how: str, *, died: bool) -> None:
        aboard = self.flights.aboard(worker.incarnation)
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
            self._ground(worker, f"is {verdict.value}", died=True)
        if self._kill is not None:
            for worker in self.fleet.hung(now, self._hung_timeout_s):
                log.error("worker for %s (pid %d) hangs, and is killed", worker.model, worker.pid)
                self._kill(worker.pid)
        self.catalogue.update()
        self.failover.sweep()

    def stop(self) -> None:
        """No new requests from here on."""
        self.stopping = True

    def abandon(self) -> None:
        """End what is still in the air, in an orderly way, because the gateway goes."""
        for flight in self.flights:
            self.give_up(flight, Code.SHUTTING_DOWN)
