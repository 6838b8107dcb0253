"""Failover: dispatch flights to workers, and to the next one when a worker is lost. Pure.

A flight whose worker was lost keeps its tokens, waits, and continues on the next eligible worker of its model
(`placement`). It fails when no worker has made a step of its model for too long.

A flight that was on a worker that crashed is a suspect until it has made progress, and is tried alone. The
crash of a worker that has a suspect counts for it and for flights without progress, any other crash for all.
The choices of a request are tried and cleared together, and at `CRASHES_MAX` crashes they fail. So a request
that crashes its worker, in prefill or at any token, does so three times: once among others, twice alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from broker.dispatch.fleet import Fleet, Worker
from broker.dispatch.flight import Flight
from broker.dispatch.flights import Flights
from broker.dispatch.placement import PlacementTarget, placements
from broker.dispatch.routing import Routing, WorkerLoad
from protocol.common.log_context import about
from protocol.errors import Code, RequestError, adapter_not_found
from protocol.messages import Adopt, Cancel, Generate, Message, Request
from protocol.types import BATCH_PRIORITY, AdoptedRow, OrphanedRow
from protocol.wire import WireError

log = logging.getLogger(__name__)

CRASHES_MAX = 3
CRASHED = f"This request has crashed its worker {CRASHES_MAX} times."
RESENDS_MAX = 8
"""Maximum resends of a flight in a row, without a token in between, because messages were lost."""
WAIT_S_MAX = 900.0
"""Longest wait of a flight for a worker, even while its model's workers serve other flights."""
REPLACED = "The model that began this answer was replaced by a different one, which cannot continue it."

_NAMED_MAX = 16

Send = Callable[[str, Message, Sequence[bytes]], bool]
"""(incarnation, message, media frames) -> whether it was queued for sending. Raises `WireError`."""


class Failover:
    """Assignment of flights to workers."""

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
        """`timeout_s`: longest wait after a worker was lost. `load_timeout_s`: the same for new flights."""
        self.routing = routing or Routing(clock)
        self.counts: Counter[str] = Counter()
        """Counts of flights that lost their worker or were starved, and of resumed ones."""
        self.continued_by: Counter[str] = Counter()
        """Flights that another plan continued, by the name of the continuing plan."""
        self._incarnation = incarnation
        self._fleet = fleet
        self._flights = flights
        self._send = send
        self._clock = clock
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s

    # --- dispatch ---

    def load(self, worker: Worker) -> tuple[bool, int]:
        """Return whether new flights must wait for crash suspects, and the worker's number of flights."""
        assigned, waiting = self._flights.assigned(worker.incarnation), self._flights.waiting(worker.model)
        tries = any(flight.is_suspect for flight in assigned)
        return tries or any(flight.is_suspect for flight in waiting), len(assigned)

    def choose_replica(self, found: Worker, request: Request, has_room: Callable[[Worker], bool]) -> Worker:
        """Choose the worker for a new request among those equivalent to `found`."""
        peers = [worker for worker in self._fleet if worker.serves and worker.can_replace(found)]
        if isinstance(request, Generate) and request.adapter:
            peers = [worker for worker in peers if worker.digest_of(request.adapter) is not None]
        if len(peers) < 2:
            return peers[0] if peers else found
        open_ones = [worker for worker in peers if not self.load(worker)[0]] or peers
        is_batch = request.priority >= BATCH_PRIORITY
        loads = self._worker_loads(list(filter(has_room, open_ones)) or open_ones, batches=is_batch)
        return self.routing.choose_worker(request, loads)

    def _worker_loads(self, workers: Sequence[Worker], *, batches: bool = False) -> list[WorkerLoad]:
        """Return the loads of workers of one model. `batches`: lines of batches count, whose places all
        others may take."""
        return self.routing.worker_loads(
            [
                (each, [f for f in self._flights.assigned(each.incarnation) if batches or not f.is_batch])
                for each in workers
            ]
        )

    def submit(self, flights: Sequence[Flight], worker: Worker | None) -> None:
        """Dispatch new flights to `worker`, or let them wait for it or another worker of the model.

        `worker`: None if there is none yet. Raises `RequestError` if it is lost or unreachable, or the
        request cannot be encoded.
        """
        gone = worker is not None and self._fleet.get(worker.incarnation) is not worker
        if gone or (worker is not None and not worker.serves):
            raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=1.0)
        if worker is None or self.load(worker)[0] or not _has_adapter(worker, flights):
            self.place()
            return
        for flight in flights:
            try:
                sent = self._dispatch(flight, worker)
            except WireError as error:  # for example an integer beyond 64 bits in a tool's schema
                raise _cannot_be_sent(error) from None
            if not sent and not self._has_others(worker):
                raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=1.0)
            if not sent:  # the worker is about to be found lost; another one takes the flights
                self._flights.leave(flight, flight.waiting_since)
        self.place()

    def _has_others(self, worker: Worker) -> bool:
        """Return whether another worker serves the same model."""
        return any(
            other.serves and other.model == worker.model for other in self._fleet if other is not worker
        )

    def _dispatch(self, flight: Flight, worker: Worker) -> bool:
        message = self._flights.assign(flight, worker.incarnation, self._clock())
        before = flight.continued_by
        flight.set_model(worker.identity, worker.plan)
        if flight.continued_by != before:
            self.continued_by[flight.continued_by] += 1
        flight.adapter_digest = worker.digest_of(flight.adapter) or ""
        flight.limit(worker.ready.context_length if worker.ready else 0)
        self.routing.on_dispatched(flight, worker)
        return self._send(worker.incarnation, message, flight.media)

    def place(self) -> None:
        """Dispatch all waiting flights that a worker may take. Call this after every change."""
        now = self._clock()
        waiting = [flight for flight in self._flights.waiting() if flight.adoptable_until <= now]
        if not waiting:
            return
        targets = [
            target for model in {flight.model for flight in waiting} for target in self._targets(model)
        ]
        for flight, target in placements(waiting, targets, self.routing.pick):
            try:
                sent = self._dispatch(flight, target.worker)
            except WireError as error:
                flight.fail(Code.INVALID_REQUEST, _cannot_be_sent(error).message)
                continue
            if not sent:
                targets.remove(target)
                self._flights.leave(flight, flight.waiting_since)
            elif flight.attempts > 1:
                self.counts["resumed"] += 1
                log.info("%s resumes after %d tokens", flight.id, flight.progress, extra=about(flight.id))
        self._fail_unservable()

    def _targets(self, model: str) -> list[PlacementTarget]:
        serving = [worker for worker in self._fleet if worker.serves and worker.model == model]
        return [
            PlacementTarget.of(worker_load, self._flights.assigned(worker_load.worker.incarnation))
            for worker_load in self._worker_loads(serving)
        ]

    def _fail_unservable(self) -> None:
        """Fail flights that were begun by a model that has since been replaced under the same name."""
        for flight in self._flights.waiting():
            serving = [worker for worker in self._fleet if worker.serves and worker.model == flight.model]
            if serving and not any(_may_finish(worker, flight) for worker in serving):
                flight.fail(Code.WORKER_UNAVAILABLE, REPLACED)
            elif serving and not any(_may_get_adapter(worker, flight) for worker in serving):
                flight.fail(Code.ADAPTER_NOT_FOUND, adapter_not_found(flight.model, flight.adapter).message)

    # --- cancellation and lost workers ---

    def cancel(self, flight: Flight) -> None:
        """Cancel the flight at its worker."""
        if flight.attempt is not None:
            self._send(flight.attempt.worker, Cancel(incarnation=self._incarnation, id=flight.attempt.id), ())

    def on_worker_lost(self, worker: Worker, *, died: bool) -> None:
        """Release the flights of a lost worker. `died`: it crashed, and one of them may be the cause."""
        assigned = self._flights.assigned(worker.incarnation)
        self.counts["grounded"] += len(assigned)
        if died and worker.ready is not None:
            self._count_crash(worker.incarnation, assigned)
        for flight in assigned:
            self._flights.leave(flight, self._clock(), may_return=True)

    def _count_crash(self, worker: str, assigned: Sequence[Flight]) -> None:
        """Count a crash for the flights that may be its cause, and for the other suspects of their requests.
        Fail the requests at the limit."""
        has_suspects = any(flight.is_suspect for flight in assigned)
        blamed = {f for f in assigned if f.is_suspect or not (has_suspects and f.proven)}
        groups = {flight.group for flight in blamed}
        charged = [f for f in self._flights if f in blamed or (f.is_suspect and f.group in groups)]
        for flight in charged:
            flight.crash_count += 1
            flight.crashed_on = worker
        failing = {flight.group for flight in charged if flight.crash_count >= CRASHES_MAX}
        for flight in self._flights:
            if flight.group in failing and flight.fail(Code.WORKER_CRASHED, CRASHED):
                log.error("%s fails: %s", flight.id, CRASHED, extra=about(flight.id))
                if flight not in assigned:
                    self.cancel(flight)

    def _withdraw_crash(self, worker: str) -> None:
        """Take back the crash of a worker that has come back."""
        for flight in self._flights:
            if flight.crashed_on == worker:
                flight.crash_count -= 1
                flight.crashed_on = ""

    def adopt(self, worker: Worker, rows: Sequence[OrphanedRow]) -> None:
        """Go on with the attempts that a connecting worker still has; it ends its other rows."""
        self._withdraw_crash(worker.incarnation)
        left = {row.id: row for row in rows}
        known = [
            (flight, left.get(flight.former.id))
            for flight in self._flights.waiting(worker.model)
            if flight.former is not None and flight.former.worker == worker.incarnation
        ]
        found = [(flight, row) for flight, row in known if row is not None and _is_whole(flight, row)]
        for flight, _ in known:
            flight.adoptable_until = 0.0
        if not rows:
            return
        adopted = [_adopted(flight) for flight, _ in found]
        if not self._send(worker.incarnation, Adopt(incarnation=self._incarnation, rows=adopted), ()):
            return  # the worker ends them all in time, and they are resent
        for flight, _ in found:
            self._flights.adopt(flight, self._clock())
            self.counts["adopted"] += 1
            log.info("%s goes on at its worker", flight.id, extra=about(flight.id))

    def on_worker_recovered(self, worker: Worker) -> None:
        """Withdraw the crash of a silent worker that has come back."""
        self._withdraw_crash(worker.incarnation)

    def resend(self, flight: Flight, why: str) -> None:
        """Resend a flight that has lost a message: a new attempt continues after the client's last token."""
        log.warning("%s is resent: %s", flight.id, why, extra=about(flight.id))
        self.cancel(flight)
        self._flights.leave(flight, self._clock())
        flight.resends += 1
        if flight.resends > RESENDS_MAX:
            flight.fail(Code.INTERNAL_ERROR, f"The request was resent too often without progress: {why}.")

    def resend_lost(self, flight: Flight) -> bool:
        """Resend a flight whose worker says that it has no such request.

        False: this has happened `RESENDS_MAX` times without a token, so the worker is at fault and has to go.
        If the next worker loses the flight too, the flight fails.
        """
        if flight.resends == RESENDS_MAX:
            flight.resends += 1
            return False
        self.resend(flight, "its worker has lost it")
        return True

    def resend_starved(self, flight: Flight, worker: Worker, bound_s: float) -> bool:
        """Resend a flight that makes no progress on its worker.

        False: this worker starved the flight before, so the worker has to go. A flight that was never
        prepared fails instead: another try would take as long.
        """
        self.counts["starved"] += 1
        if flight.attempt is not None and not flight.attempt.accepted:
            self.cancel(flight)
            flight.fail(Code.INTERNAL_ERROR, f"The request could not be prepared within {bound_s:g} s.")
            return True
        if flight.starved_by == worker.incarnation:
            return False
        flight.starved_by = worker.incarnation
        self.resend(flight, f"no progress on its worker for {bound_s:g} s")
        return True

    def on_progress(self, flight: Flight) -> None:
        """Clear the suspects of a request if all of them have made progress."""
        suspects = [each for each in self._flights if each.group == flight.group and each.is_suspect]
        if all(each.proven or each.terminal is not None for each in suspects):
            for each in suspects:
                each.crash_count, each.crashed_on = 0, ""

    # --- the clock ---

    def sweep(self) -> None:
        """Fail flights that waited too long. Call this periodically."""
        self.place()
        self._give_up()

    def _give_up(self) -> None:
        """Fail flights that wait too long for a step of their model."""
        now = self._clock()
        loaded = {worker.model for worker in self._fleet if worker.fit}
        for flight in self._flights.waiting():
            model = self._fleet.models.get(flight.model)  # None: a restored flight's model is gone
            waited_s = now - max(flight.waiting_since, model.advanced_at if model else 0.0)
            if not flight.was_placed and flight.model not in loaded:
                if waited_s > self._load_timeout_s:
                    message = f"The model `{flight.model}` was not ready within {self._load_timeout_s:g} s."
                    flight.fail(Code.MODEL_LOADING, message)
            elif now - flight.waiting_since > WAIT_S_MAX:
                message = f"No worker took this request within {WAIT_S_MAX:g} s."
                flight.fail(Code.WORKER_UNAVAILABLE, message)
            elif waited_s > self._timeout_s:
                message = f"The worker was lost, and no other took over within {self._timeout_s:g} s."
                flight.fail(Code.WORKER_UNAVAILABLE, message)


def _has_adapter(worker: Worker, flights: Sequence[Flight]) -> bool:
    return all(worker.digest_of(flight.adapter) is not None for flight in flights)


def _may_get_adapter(worker: Worker, flight: Flight) -> bool:
    """Return whether the worker can take the flight with its adapter, or may once it has loaded it."""
    return flight.adapter in worker.awaited_adapters or flight.fits_adapter(worker.digest_of(flight.adapter))


def _is_whole(flight: Flight, row: OrphanedRow) -> bool:
    """Return whether the worker can send all that the flight lacks of this attempt."""
    attempt = flight.former
    assert attempt is not None
    has_start = flight.accepted and flight.is_scored
    return row.first <= attempt.deltas <= row.deltas and (row.whole or has_start)


def _adopted(flight: Flight) -> AdoptedRow:
    attempt = flight.former
    assert attempt is not None
    return AdoptedRow(
        id=attempt.id,
        deltas=attempt.deltas,
        scored=flight.scored,
        accepted=flight.accepted and attempt.accepted,
        reused=attempt.reused,
    )


def _may_finish(worker: Worker, flight: Flight) -> bool:
    return flight.can_continue_on(worker.identity, stands_in=worker.stands_in)


def listed(assigned: Sequence[Flight]) -> str:
    """Format a worker's flights for the log: number of tokens of each, and crash suspects."""
    named = [
        f"{f.id} ({len(f.tokens)} tokens{', suspect' if f.is_suspect else ''})" for f in assigned[:_NAMED_MAX]
    ]
    names = f": {', '.join(named)}" if named else ""
    more = f" and {len(assigned) - _NAMED_MAX} more" if len(assigned) > _NAMED_MAX else ""
    count = "1 request" if len(assigned) == 1 else f"{len(assigned)} requests"
    return f"{count} in flight{names}{more}"


def _cannot_be_sent(error: WireError) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, f"The request cannot be encoded: {error}.")
