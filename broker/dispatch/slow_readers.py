"""Slow readers: streams that occupy rows although their clients do not read them. Pure.

A client counts as slow when more output than the buffers take has waited for it for `UNREAD_S_MAX`. Its
stream goes on as long as no other request needs its row. Until its receive buffer is full, usually with
64 KiB, a client that does not read cannot be told from one that does.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.dispatch.admission import has_begun
from broker.dispatch.flight import Flight

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
