"""Handler of worker messages about requests: passes them on to their flights. Pure and stateless.

Messages may be lost or duplicated in transit: unexpected ones are counted, and a flight that lacks a part is
resent (`failover`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from broker.dispatch.admission import Admission
from broker.dispatch.failover import Failover, Send
from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Attempt, DeltaResult, Flight
from broker.dispatch.flights import Flights
from broker.dispatch.traffic import Traffic
from protocol.common.log_context import about
from protocol.messages import (
    Accepted,
    Cancel,
    EmbeddingChunk,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    PrefixHit,
    PromptLogprobs,
    StepOutputs,
)
from protocol.tasks import runs_nothing

log = logging.getLogger(__name__)

ATTEMPT_AGE_S_MIN = 1.0
"""A younger attempt may not have reached the worker yet."""
MISSED_HEARTBEATS_MAX = 4


class WorkerMessages:
    """Passes worker messages to their flights."""

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
        """`dropped`: counters of unexpected messages, by reason."""
        self._incarnation = incarnation
        self._flights = flights
        self._failover = failover
        self._admission = admission
        self._send = send
        self._clock = clock
        self._dropped = dropped
        self._traffic = traffic

    def accept(self, message: Accepted) -> None:
        """Handle the acceptance of a request."""
        flight = self._flight(message.id, message.incarnation)
        if flight is not None and flight.attempt is not None and not flight.attempt.accepted:
            # Embeddings and reranking report nothing more before their first vectors.
            flight.enter("waiting" if isinstance(flight.request, Generate) else "prefill", self._clock())
        if flight is not None:
            flight.accept(message)

    def pass_on(self, worker: Worker, message: PrefixHit | Finished | Failed) -> None:
        """Handle a prefix hit or the end of a request."""
        flight = self._flight(message.id, message.incarnation)
        if flight is None:
            return
        match message:
            case PrefixHit():
                if not flight.reused(message):
                    self._dropped["unexpected"] += 1
                    return
                flight.enter("prefill", self._clock())
                if flight.attempts == 1:
                    self._traffic.reused(flight)
            case Finished() if flight.terminal is None and flight.lacks(message):
                self._dropped["gap"] += 1
                self._failover.resend(flight, f"its end arrived after only {flight.progress} tokens")
            case _:
                if flight.end(message) and isinstance(message, Finished):
                    self._finished(worker, flight, message)

    def _finished(self, worker: Worker, flight: Flight, message: Finished) -> None:
        self._failover.routing.finished(flight, worker, message)
        # Requests that only count tokens say nothing about the service time, nor do those that waited for a
        # gateway, or give way to others.
        if not (runs_nothing(flight.request) or flight.epoch or flight.is_batch):
            self._admission.served(self._clock() - flight.opened_at)

    def score(self, message: PromptLogprobs) -> None:
        """Handle prompt logprobs."""
        flight = self._open_flight(message.id, message.incarnation)
        if flight is not None:
            self._settle(flight, flight.score(message, self._clock()), f"prompt token {message.first}")

    def encode(self, message: EmbeddingChunk) -> None:
        """Handle embedding vectors or scores."""
        flight = self._open_flight(message.id, message.incarnation)
        if flight is not None:
            excess = "vectors of unknown or already answered texts"
            result = flight.accept_delta(message, self._clock())
            self._settle(flight, result, f"chunk {message.sequence}", excess)

    def accept_outputs(self, worker: Worker, message: StepOutputs) -> None:
        """Handle the outputs of a step."""
        now, taken, first_tokens, tokens = self._clock(), 0, 0, 0
        for delta in message.deltas:
            flight = self._open_flight(delta.id, message.incarnation)
            if flight is None:
                continue
            result = flight.accept_delta(delta, now)
            if result is not DeltaResult.TAKEN:
                excess = f"more than {flight.tokens_max} tokens"
                self._settle(flight, result, f"delta {delta.sequence}", excess)
                continue
            taken += 1
            tokens += len(delta.tokens)
            if not delta.sequence:
                first_tokens += 1
                flight.enter("decode", now)
                if flight.attempts == 1:
                    self._traffic.began(flight, now)
            if flight.is_suspect:
                self._failover.on_progress(flight)
        if taken:
            self._traffic.stepped(worker, now, pieces=taken, first_tokens=first_tokens, tokens=tokens)

    def _settle(self, flight: Flight, result: DeltaResult, place: str, excess: str = "") -> None:
        """Act on the outcome of accepting output. `place`: where it belongs; `excess`: what it is, if the
        request cannot have it."""
        match result:
            case DeltaResult.TAKEN:
                if flight.is_suspect:
                    self._failover.on_progress(flight)
            case DeltaResult.DUPLICATE:
                self._dropped["double"] += 1
            case DeltaResult.GAP:
                self._dropped["gap"] += 1
                self._failover.resend(flight, f"messages were lost before {place}")
            case DeltaResult.EXCESS:
                self._dropped["beyond"] += 1
                self._failover.resend(flight, f"it got {excess}")
            case DeltaResult.OVER:
                log.warning("%s is cancelled: its client reads too slowly", flight.id, extra=about(flight.id))
                self._failover.cancel(flight)

    def reconcile(self, worker: Worker, beat: Heartbeat) -> bool:
        """Resend flights that the worker has lost; cancel rows that it should not have.

        False: it has lost the same flight too often and should get no more requests.
        """
        name, is_reliable = worker.incarnation, True
        for flight in lost(worker, beat, self._flights.assigned(name), self._clock()):
            self._dropped["lost"] += 1
            is_reliable &= self._failover.resend_lost(flight)
        for row in strays(worker, beat, self._flights.attempts(name)):
            self._dropped["stray"] += 1
            self._send(name, Cancel(incarnation=self._incarnation, id=row), ())
        return is_reliable

    def _flight(self, id: str, worker: str) -> Flight | None:
        flight = self._flights.find(id, worker)
        if flight is None:
            self._dropped["no_flight"] += 1
        return flight

    def _open_flight(self, id: str, worker: str) -> Flight | None:
        """Return a flight that takes output; None if it has ended."""
        flight = self._flight(id, worker)
        return None if flight is None or flight.terminal is not None else flight


# --- reconcile heartbeats with flights -----------------------------------------------------------------
#
# Heartbeats lag: rows are reported about every 0.2 s, after a step, and without requests that are still being
# tokenized. So a flight counts as lost only when it is missing from several consecutive heartbeats with steps
# between them, and a row counts as stray only when two consecutive heartbeats list it.


def lost(worker: Worker, beat: Heartbeat, assigned: Sequence[Flight], now: float) -> list[Flight]:
    """Return flights whose request or end was lost in transit. `worker`: its state before this heartbeat."""
    held = {row.id for row in beat.rows}
    is_idle = not (beat.running or beat.waiting)
    has_worked = is_idle or beat.steps != worker.steps
    preparing = beat.running + beat.waiting > len(beat.rows)
    found = []
    for flight in assigned:
        attempt = flight.attempt
        assert attempt is not None
        if attempt.id in held:
            attempt.missed_heartbeats = 0
        elif has_worked and _is_due(attempt, now, preparing=preparing):
            attempt.missed_heartbeats += 1
            if attempt.missed_heartbeats >= MISSED_HEARTBEATS_MAX:
                found.append(flight)
    return found


def _is_due(attempt: Attempt, now: float, *, preparing: bool) -> bool:
    return now - attempt.began_at >= ATTEMPT_AGE_S_MIN and (attempt.accepted or not preparing)


def strays(worker: Worker, beat: Heartbeat, known: Collection[str]) -> list[str]:
    """Return ids of rows without a flight, listed in this heartbeat and in the one before it."""
    before = {row.id for row in worker.beat.rows} if worker.beat else set()
    return [row.id for row in beat.rows if row.id in before and row.id not in known]
