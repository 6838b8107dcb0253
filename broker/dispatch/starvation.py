"""Starved flights: requests without progress although their worker serves others or is idle, and streams that
their clients do not read. Pure.

The worker watches its own rows and acts sooner (`worker/core/failures.py`). This is the same rule on
the gateway's clock, from output and heartbeats, for a worker that does not notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.dispatch.admission import has_begun
from broker.dispatch.fleet import Fleet, Worker
from broker.dispatch.flight import Flight
from broker.dispatch.flights import Flights
from protocol.common.progress import ProgressWatch, Watched
from protocol.messages import Generate
from protocol.types import RequestStatus

_PLACED = ("prefill", "decode")


class Starvation:
    """The progress watchdogs of a fleet, one for each worker."""

    def __init__(self, fleet: Fleet, flights: Flights) -> None:
        self._fleet = fleet
        self._flights = flights
        self._watches: dict[str, ProgressWatch] = {}

    def check(self, now: float) -> Iterator[tuple[Worker, list[Flight]]]:
        """Yield workers with the flights that they starve. Call this a few times a second."""
        before, self._watches = self._watches, {}
        for worker in self._fleet:
            if worker.ready is None or worker.verdict is not None:
                continue
            watch = before.get(worker.incarnation) or ProgressWatch(self._fleet.stall_timeout_s)
            self._watches[worker.incarnation] = watch
            if watch.is_due(now) and (starved := self._starved(worker, watch, now)):
                yield worker, starved

    def _starved(self, worker: Worker, watch: ProgressWatch, now: float) -> list[Flight]:
        beat = worker.beat
        rows = {row.id: row for row in beat.rows} if beat else {}
        flights = self._flights.assigned(worker.incarnation)
        # Lines of batches wait for others at any time, also once they have begun.
        watched_ones = [flight for flight in flights if not flight.is_batch] or flights
        assigned = {flight.id: flight for flight in watched_ones}
        watched = [_watched(flight, rows) for flight in assigned.values()]
        # With rows free, memory may still be short: only an idle worker surely has room.
        found = watch.check(watched, now, has_room=beat is not None and not beat.running)
        return [assigned[id] for id in found]


def _watched(flight: Flight, rows: dict[str, RequestStatus]) -> Watched:
    attempt = flight.attempt
    assert attempt is not None, "the flight is assigned to a worker"
    row = rows.get(attempt.id)
    phase = row.phase if row else ""
    state = (
        attempt.id,
        attempt.accepted,
        attempt.reused,
        attempt.deltas,
        attempt.scored,
        (phase, row.prefilled, row.answered, row.work) if row else None,
    )
    is_decoding = phase == "decode" or (isinstance(flight.request, Generate) and attempt.deltas > 0)
    return Watched(
        flight.id,
        (flight.request.priority, attempt.began_at),
        state,
        has_place=is_decoding or phase in _PLACED,
        is_decoding=is_decoding,
    )


# --- Slow readers: streams that occupy rows although their clients do not read them ------------------
#
# A client counts as slow when more output than the buffers take has waited for it for `UNREAD_S_MAX`. Its
# stream goes on as long as no other request needs its row. Until its receive buffer is full, usually with
# 64 KiB, a client that does not read cannot be told from one that does.

UNREAD_S_MAX = 0.5
"""Time in seconds for which a client may leave its stream unread while other requests wait."""
WAIT_S_MIN = 0.25
"""Time in seconds after its dispatch from which on a request counts as waiting. Below it, the worker may be
about to begin it."""
DISPLACED = f"The client did not read its stream for {UNREAD_S_MAX:g} s while other requests waited."


def displaced(assigned: Sequence[Flight], now: float) -> list[Flight]:
    """Return the flights of a worker that give their rows to waiting ones, the longest unread first.

    `assigned`: all unfinished flights of the worker.
    """
    waiting = sum(_waits(flight, now) for flight in assigned)
    if not waiting:
        return []
    slow = [(flight.unread_since, flight) for flight in assigned if _is_slow(flight, now)]
    slow.sort(key=lambda pair: pair[0] or 0.0)
    return [flight for _, flight in slow[:waiting]]


def _waits(flight: Flight, now: float) -> bool:
    """Return whether a flight waits for a row: its worker has tokenized it, and not begun it."""
    attempt = flight.attempt
    if attempt is None or not attempt.accepted or has_begun(flight) or flight.is_batch:
        return False
    return now - attempt.began_at >= WAIT_S_MIN


def _is_slow(flight: Flight, now: float) -> bool:
    return flight.unread_since is not None and now - flight.unread_since >= UNREAD_S_MAX
