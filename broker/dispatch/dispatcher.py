"""Dispatcher: the gateway's state (fleet, flights, admission), driven by messages and the clock.

Pure: the send function and the clock are injected. The transport delivers worker messages, the HTTP routes
open flights; a simulation can do both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from broker.dispatch.adapters import AdapterCatalogue
from broker.dispatch.admission import Admission, check_prompt
from broker.dispatch.cache_clear import CacheClear, CacheClears
from broker.dispatch.catalogue import Catalogue, Tell
from broker.dispatch.checkpoint import Checkpoint, checkpoint_of, flight_of
from broker.dispatch.failover import Failover, Send, listed
from broker.dispatch.figures import ModelFigures
from broker.dispatch.fleet import Fleet, HealthState, Target, UnloadedModel, Worker
from broker.dispatch.flight import LONG_S, Flight, Item
from broker.dispatch.flights import Flights
from broker.dispatch.history import MetricsHistory
from broker.dispatch.routing import Routing
from broker.dispatch.starvation import DISPLACED, Starvation, displaced
from broker.dispatch.traffic import Traffic
from broker.dispatch.worker_messages import WorkerMessages
from protocol.errors import Code, RequestError
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    AdaptersChanged,
    CacheCleared,
    ClearCache,
    Draining,
    EmbeddingChunk,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Loading,
    PrefixHit,
    PromptLogprobs,
    Ready,
    Rejected,
    Request,
    StepOutputs,
    ToGateway,
    Welcome,
)
from protocol.tasks import Task
from protocol.types import BATCH_PRIORITY

log = logging.getLogger(__name__)

RESTORED_FLIGHTS_MAX = 4096
"""Maximum of flights in a gateway beyond which none is restored; the journal keeps the others."""

End = Callable[[str, int], str]
"""(incarnation, process id) -> what was done about an unresponsive worker, for the log: killed if it is a
verified process of this machine, disconnected if it may be on another one."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds: for failover, for loading a model, and until an unresponsive worker is killed.

    `unload_after_s`: idle time before a model is unloaded; None: never. `orphan_s`: for how long a worker
    keeps its requests when its connection is lost.
    """

    failover_s: float = 120.0
    load_s: float = 300.0
    hung_s: float = 15.0
    unload_after_s: float | None = None
    orphan_s: float = 60.0


class Dispatcher:
    """The gateway's state: one per process, used on the event loop only."""

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
        """`host`: this machine; workers on other machines are not the supervisor's processes."""
        self._timeouts = timeouts = timeouts or Timeouts()
        self.incarnation = incarnation
        self.fleet = fleet
        self.flights = Flights()
        self.traffic = Traffic()
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
        self.adapters = AdapterCatalogue(
            incarnation, fleet, self.flights, lambda worker, message: send(worker, message, ())
        )
        self.figures = ModelFigures(fleet, self.flights, self.traffic, self.catalogue, self.adapters)
        self.history = MetricsHistory(self.figures)
        self.admission = admission
        self.dropped: Counter[str] = Counter()
        self._worker_messages = WorkerMessages(
            incarnation=incarnation,
            flights=self.flights,
            failover=self.failover,
            admission=admission,
            send=send,
            clock=clock,
            dropped=self.dropped,
            traffic=self.traffic,
        )
        self.on_served: Callable[[str, Ready | None], None] = lambda model, ready: None
        """Called with a model that a worker serves from now on, or (None) none any more."""
        self.on_closed: Callable[[], None] = lambda: None
        """Called when flights are closed: a row may be free."""
        self.stopping = False
        """Whether the gateway drains: it begins nothing by itself, and answers what clients still ask."""
        self._is_drained = False
        """Whether the time for that is over."""
        self._cache_clears = CacheClears()
        self._starvation = Starvation(fleet, self.flights)
        self._send = send
        self._clock = clock
        self._end = end

    # --- requests ---

    def choose(self, asked: str | None, adapter: str | None = None) -> Target:
        """Return the target of a request that generates and may name an adapter, as MODEL:NAME or by itself.

        Raises `RequestError`.
        """
        model, named = self.adapters.split(asked, self.catalogue.resolve) if asked else (None, "")
        if adapter and named and adapter != named:
            message = f"'adapter' is {adapter[:100]!r}, but 'model' names another one."
            raise RequestError(Code.INVALID_REQUEST, message, param="adapter")
        target = Target(self.find(model), adapter or named)
        self.adapters.require(target.model, target.adapter)
        return target

    def find(self, model: str | None, task: Task = "generate") -> Worker | UnloadedModel:
        """Return the worker for a request, or the unloaded model that it may wait for. Raises `RequestError`.

        `task`: selects the model if `model` is None or empty.
        """
        if self._is_drained:
            raise RequestError(Code.SHUTTING_DOWN, retry_after_s=2.0)
        name = self.catalogue.resolve(model) if model else self.catalogue.default_model(task)
        return self.catalogue.expected.find(name, task) or self._find(name, task)

    def _find(self, name: str | None, task: Task = "generate") -> Worker | UnloadedModel:
        return self.catalogue.unloaded(name) or self.fleet.find(name, self._clock(), self.failover.load, task)

    def check_ready(self) -> None:
        """Raise `RequestError` if no model is served or can be loaded, or the gateway stops."""
        if self.stopping:
            raise RequestError(Code.SHUTTING_DOWN, retry_after_s=2.0)
        names = list(self.catalogue.states) if self.catalogue.on_demand else [None]
        refusals = []
        for name in names:
            try:
                self._find(name)
            except RequestError as error:
                refusals.append(error)
        if len(refusals) == len(names):
            raise refusals[0]

    @contextmanager
    def submit(
        self, found: Worker | UnloadedModel, requests: Sequence[Request], media: Sequence[bytes]
    ) -> Iterator[list[Flight]]:
        """Submit a client's requests, one for each choice, to a worker, or queue them: all or none.

        While the context is open, the flights collect the output. Leaving it closes the flights and cancels
        unfinished ones at their worker. Raises `RequestError` if the worker is full or unreachable, or the
        prompt is certainly too long for it.
        """
        if isinstance(found, UnloadedModel) or not self._is_there(found):
            # It was drained or lost, or a worker has connected since then; another one may serve the model.
            found = self.find(found.model)
        if isinstance(found, Worker):
            found = self.failover.choose_replica(
                found, requests[0], lambda worker: self._has_room(worker, requests)
            )
        assert found.ready is not None
        if isinstance(found, Worker):
            check_prompt(requests[0], found.ready)
        if (
            requests[0].priority < BATCH_PRIORITY
        ):  # the number of a batch's lines in flight is limited already
            self.admission.check(self.present(found), found.ready, requests)
        now = self._clock()
        flights = [self.flights.open(request, found.model, now, media) for request in requests]
        for flight in flights:
            flight.group = flights[0].id
        assigned = False
        try:
            self.failover.submit(flights, found if isinstance(found, Worker) else None)
            self.catalogue.expected.note(found.model, flights)
            assigned = True
            self.catalogue.update()
            yield flights
        finally:
            self._close(flights, counted=assigned)

    @contextmanager
    def restore(
        self,
        unfinished: Sequence[tuple[Checkpoint, Sequence[Item]]],
        media: Sequence[bytes],
        elapsed_s: float,
    ) -> Iterator[list[Flight]]:
        """Put the unfinished flights of one request back, as `submit` opened them in an earlier gateway.

        `unfinished`: the checkpoint of each, and its output.

        `elapsed_s`: seconds since the checkpoints were taken. The flights were admitted, so they are not
        refused now: they wait for a worker like flights that have lost theirs. The context is that of
        `submit`. Raises `RequestError` if there are `RESTORED_FLIGHTS_MAX` flights, which have to end first,
        and `ValueError` if one of them is open already.
        """
        if self._is_drained:
            raise RequestError(Code.SHUTTING_DOWN, retry_after_s=2.0)
        if len(self.flights) + len(unfinished) > RESTORED_FLIGHTS_MAX:
            raise self.admission.busy(list(self.flights), "Too many requests were restored at once")
        flights: list[Flight] = []
        try:
            for checkpoint, output in unfinished:
                flight = flight_of(checkpoint, output, media, self._clock(), elapsed_s, self.incarnation)
                flight.group = unfinished[0][0].request.id
                self.flights.add(flight)
                flights.append(flight)
                self.failover.counts["restored"] += 1
            self.failover.place()
            self.catalogue.update()
            yield flights
        finally:
            self._close(flights)

    def checkpoint(self, flight: Flight) -> Checkpoint:
        """Return the checkpoint of an unfinished flight."""
        return checkpoint_of(flight, self._clock())

    def _close(self, flights: Sequence[Flight], *, counted: bool = True) -> None:
        for flight in flights:
            if counted:
                self.traffic.ended(flight, self._clock())
            if flight.terminal is None:
                self.failover.cancel(flight)
            self.flights.close(flight)
        self.adapters.sweep()
        self.failover.place()
        self.catalogue.update()
        self.on_closed()

    def _has_room(self, worker: Worker, requests: Sequence[Request]) -> bool:
        ready = None if worker.refuses_long else worker.ready
        return ready is not None and self.admission.has_room(self.present(worker), ready, requests)

    def _is_there(self, worker: Worker) -> bool:
        return worker.serves and self.fleet.get(worker.incarnation) is worker

    def present(self, found: Worker | UnloadedModel) -> list[Flight]:
        """Return the flights that count for admission: on this worker, or waiting for its model. Lines of
        batches do not: they give way."""
        assigned = self.flights.assigned(found.incarnation) if isinstance(found, Worker) else []
        return [f for f in (*assigned, *self.flights.waiting(found.model)) if not f.is_batch]

    def give_up(self, flight: Flight, code: Code, message: str = "") -> None:
        """Fail a flight with an error of the gateway, and cancel it at its worker."""
        if flight.fail(code, message):
            self.failover.cancel(flight)

    @contextmanager
    def clear(self, model: str | None, id: str, namespace: str = "") -> Iterator[CacheClear]:
        """Clear the prefix caches of all workers that serve `model` (None: of all serving workers).

        `namespace`: only prefixes in it; empty: all. While the context is open, the replies are collected.
        Raises `RequestError` if no worker serves or one cannot be reached.
        """
        if model is not None:
            model = self.catalogue.resolve(model)
        self.fleet.find(model, self._clock(), self.failover.load)
        serving = [worker for worker in self.fleet if worker.serves and model in (None, worker.model)]
        awaited = {worker.incarnation: worker.model for worker in serving}
        order = ClearCache(incarnation=self.incarnation, id=id, namespace=namespace)
        with self._cache_clears.open(id, awaited) as cache_clear:
            for worker in serving:
                if not self._send(worker.incarnation, order, ()):
                    raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=1.0)
            yield cache_clear

    # --- worker messages ---

    def on_message(self, sender: str, message: ToGateway) -> None:
        """Handle a message from the connection `sender`."""
        if message.incarnation != sender:
            self.dropped["forged"] += 1
            return
        if isinstance(message, Hello):
            self._on_hello(message)
            return
        worker = self.fleet.get(sender)
        if worker is None:
            self._unknown(sender)
            return
        if self.fleet.touch(worker, self._clock()):
            self.failover.on_worker_recovered(worker)
        if isinstance(message, StepOutputs):
            self.fleet.advanced(worker, self._clock())
            self._worker_messages.accept_outputs(worker, message)
        elif isinstance(message, EmbeddingChunk):
            self.fleet.advanced(worker, self._clock())
            self._worker_messages.encode(message)
        elif isinstance(message, PromptLogprobs):
            self.fleet.advanced(worker, self._clock())
            self._worker_messages.score(message)
        elif isinstance(message, Accepted):
            self._worker_messages.accept(message)
        else:
            self._handle(worker, message)
        self.failover.place()

    def _on_hello(self, message: Hello) -> None:
        if reason := self.fleet.objection(message):
            log.error("worker %s (pid %d) rejected: %s", message.model, message.pid, reason)
            self._send(message.incarnation, Rejected(incarnation=self.incarnation, reason=reason), ())
            return
        # A repeated Hello means that the worker lost its connection.
        was_here = self._remove(message.incarnation, "reconnected", died=False)
        worker = self.fleet.hello(message, self._clock())
        self.catalogue.expected.forget(message.model)
        self.traffic.worker(worker, self._clock(), "connected")
        log.info("worker for %s connected (pid %d)", message.model, message.pid)
        self._send(message.incarnation, self._welcome(), ())
        self.failover.adopt(worker, message.rows)
        if was_here:
            self.catalogue.update()
        self.failover.place()

    def _welcome(self) -> Welcome:
        return Welcome(
            incarnation=self.incarnation,
            version=PROTOCOL_VERSION,
            orphan_s=self._timeouts.orphan_s,
        )

    def _unknown(self, sender: str) -> None:
        # Either late messages of a dead worker, which will not read the reply, or a worker that outlived the
        # previous gateway and sends a Hello when it sees the new incarnation.
        self.dropped["unknown_sender"] += 1
        self._send(sender, self._welcome(), ())

    def _handle(self, worker: Worker, message: ToGateway) -> None:
        now = self._clock()
        match message:
            case Heartbeat():
                self._on_heartbeat(worker, message, now)
            case PrefixHit() | Finished() | Failed():
                self._worker_messages.pass_on(worker, message)
            case Loading():
                self.fleet.loading(worker, message)
            case Ready():
                if worker.ready is None:
                    self.traffic.worker(worker, now, "ready")
                    log.info("%s is ready: context %d tokens", message.model, message.context_length)
                self.fleet.ready(worker, message, now)
                self.adapters.on_ready(worker)
                self.on_served(worker.model, message)
                self.catalogue.update()
            case Draining():
                log.info("worker for %s (pid %d) is draining", worker.model, worker.pid)
                worker.draining = True
            case Goodbye():
                self.lost(worker.incarnation, f"said goodbye: {message.reason}", died=message.died)
            case CacheCleared():
                self._on_cache_cleared(message)
            case AdaptersChanged():
                self.adapters.on_changed(worker, message)
            case _:
                self.dropped["unexpected"] += 1

    # --- lost workers, and the clock ---

    def lost(self, incarnation: str, how: str = "connection lost", *, died: bool = True) -> None:
        """Remove a dead worker; its flights continue on another one."""
        if self._remove(incarnation, how, died=died):
            self.catalogue.update()
            self.failover.place()

    def _remove(self, incarnation: str, how: str, *, died: bool) -> bool:
        worker = self.fleet.gone(incarnation)
        if worker is None:
            return False
        self.traffic.of(worker.model).losses["dead" if died else "left"] += 1
        self._on_worker_lost(worker, how, died=died)
        self._cache_clears.lose(incarnation)
        self.adapters.on_lost(worker)
        if all(other.model != worker.model for other in self.fleet):
            self.on_served(worker.model, None)
        return True

    def _on_worker_lost(self, worker: Worker, how: str, *, died: bool) -> None:
        assigned = self.flights.assigned(worker.incarnation)
        self.traffic.worker(worker, self._clock(), how)
        who = f"worker for {worker.model} (pid {worker.pid})"
        # The supervisor logs how the process ended.
        log.warning("%s %s after step %d, %s", who, how, worker.steps, listed(assigned))
        self.failover.on_worker_lost(worker, died=died)

    def sweep(self) -> None:
        """Find unresponsive workers and expired flights. Call this a few times a second."""
        now = self._clock()
        for worker in self.fleet.sweep(now):
            self._take_out(worker, worker.verdict or HealthState.SILENT, died=True)
        for worker, flights in self._starvation.check(now):
            self._relieve(worker, flights)
        for worker in self.fleet:
            for flight in displaced(self.flights.assigned(worker.incarnation), now):
                self.give_up(flight, Code.CLIENT_TOO_SLOW, DISPLACED)
        if self._end is not None:
            for worker in self.fleet.hung(now, self._timeouts.hung_s):
                how = self._end(worker.incarnation, worker.pid)
                log.error("worker for %s (pid %d) is unresponsive: %s", worker.model, worker.pid, how)
        for flight in self.flights:
            if flight.becomes_long(now):
                text = "%s generates for %g s without max_tokens: %d tokens so far (see --max-tokens-default)"
                log.info(text, flight.id, LONG_S, len(flight.tokens))
        self.adapters.sweep()
        self.catalogue.update()
        self.failover.sweep()
        for model in self.catalogue.expected.sweep(self.find):
            self.on_served(model, None)
        self.history.tick(now)

    def _relieve(self, worker: Worker, flights: Sequence[Flight]) -> None:
        """Resend starved flights; take the worker out of service if it starved one of them before."""
        taken = [
            self.failover.resend_starved(flight, worker, self.fleet.stall_timeout_s) for flight in flights
        ]
        if not all(taken):
            self._take_out_starving(worker)

    def _on_heartbeat(self, worker: Worker, message: Heartbeat, now: float) -> None:
        is_reliable = self._worker_messages.reconcile(worker, message)
        self.fleet.heartbeat(worker, message, now)
        if not is_reliable:
            self._take_out_starving(worker)

    def _on_cache_cleared(self, message: CacheCleared) -> None:
        if not message.namespace:  # prefixes outside of it are still there
            self.failover.routing.affinity.forget(message.incarnation)
        if not self._cache_clears.answer(message):
            self.dropped["no_clearing"] += 1

    def _take_out_starving(self, worker: Worker) -> None:
        worker.verdict = HealthState.STARVING
        self._take_out(worker, HealthState.STARVING, died=False)

    def _take_out(self, worker: Worker, verdict: HealthState, *, died: bool) -> None:
        for flight in self.flights.assigned(worker.incarnation):
            self.failover.cancel(flight)
        self.traffic.of(worker.model).losses[verdict.value] += 1
        self._on_worker_lost(worker, f"is {verdict.value}", died=died)

    def stop(self) -> None:
        """Begin nothing that no client waits for from now on."""
        self.stopping = True

    def fail_all(self) -> None:
        """Fail all flights, and refuse requests, because the gateway shuts down."""
        self._is_drained = True
        for flight in self.flights:
            self.give_up(flight, Code.SHUTTING_DOWN)
