"""Heartbeats against flights: what a worker says it holds, and what it was sent. Pure.

A worker's word is late: its rows are told about every 0.2 s, after a step, and a request that is still being
tokenized is not among them. So a flight counts as lost only when it is missing from several beats in a row,
between each of which steps were made, and a row as a stray only when two beats in a row name it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight, Leg
from protocol.messages import Heartbeat

UNSEEN_S_MIN = 1.0
"""A leg younger than this may still be on its way."""
BEATS_MISSED_MAX = 4


def lost(worker: Worker, beat: Heartbeat, aboard: Sequence[Flight], now: float) -> list[Flight]:
    """Flights whose request, or whose end, must have got lost on the line. `worker`: before this beat."""
    held = {row.id for row in beat.rows}
    is_idle = not (beat.running or beat.waiting)
    has_worked = is_idle or beat.steps != worker.steps
    preparing = beat.running + beat.waiting > len(beat.rows)
    found = []
    for flight in aboard:
        leg = flight.leg
        assert leg is not None
        if leg.id in held:
            leg.beats_missed = 0
        elif has_worked and _is_due(leg, now, preparing=preparing):
            leg.beats_missed += 1
            if leg.beats_missed >= BEATS_MISSED_MAX:
                found.append(flight)
    return found


def _is_due(leg: Leg, now: float, *, preparing: bool) -> bool:
    return now - leg.began_at >= UNSEEN_S_MIN and (leg.accepted or not preparing)


def strays(worker: Worker, beat: Heartbeat, known: Collection[str]) -> list[str]:
    """Rows that no flight has sent, in this beat and in the one before it."""
    before = {row.id for row in worker.beat.rows} if worker.beat else set()
    return [row.id for row in beat.rows if row.id in before and row.id not in known]
