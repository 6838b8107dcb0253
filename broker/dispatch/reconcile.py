"""Reconcile a worker's heartbeats with the flights that were sent to it. Pure.

Heartbeats lag: rows are reported about every 0.2 s, after a step, and without requests that are still being
tokenized. So a flight counts as lost only when it is missing from several consecutive heartbeats with steps
between them, and a row counts as stray only when two consecutive heartbeats list it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Attempt, Flight
from protocol.messages import Heartbeat

ATTEMPT_AGE_S_MIN = 1.0
"""A younger attempt may not have reached the worker yet."""
MISSED_HEARTBEATS_MAX = 4


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
