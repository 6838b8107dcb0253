"""Flights: the table of all flights of a gateway, and their attempts. Pure; times are given.

It alone begins and ends attempts, so a flight has one at most, and waits for a worker when it has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from broker.dispatch.flight import Attempt, Flight
from protocol.messages import Encode, Request


class Flights:
    """All flights, by id, by worker and attempt, and those waiting for a worker."""

    def __init__(self) -> None:
        self._by_id: dict[str, Flight] = {}
        self._by_attempt: dict[str, dict[str, Flight]] = {}
        self._waiting: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._by_id.values()))

    def get(self, id: str) -> Flight | None:
        return self._by_id.get(id)

    def open(self, request: Request, model: str, now: float, media: Sequence[bytes] = ()) -> Flight:
        """Open a flight that waits for a worker. Raises `ValueError` if its id is in use."""
        flight = Flight(request, model, opened_at=now, waiting_since=now, media=media)
        flight.enter("queued", now)
        self.add(flight)
        return flight

    def add(self, flight: Flight) -> None:
        """Add a flight that waits for a worker. Raises `ValueError` if its id is in use."""
        if flight.id in self._by_id:
            raise ValueError(f"flight {flight.id} is already open")
        self._by_id[flight.id] = self._waiting[flight.id] = flight

    def assign(self, flight: Flight, worker: str, now: float) -> Request:
        """Begin a new attempt of a waiting flight; return the message that dispatches it."""
        assert flight.attempt is None
        flight.attempts += 1
        # The unique id keeps late messages of earlier attempts apart. A checkpoint may not know the latest
        # ones, so attempts of a restored flight are named after the gateway too.
        id = flight.id if flight.attempts == 1 and not flight.epoch else f"{flight.id}~{flight.attempts}"
        id = f"{id}.{flight.epoch}" if flight.epoch else id
        self._begin(flight, Attempt(id, worker, began_at=now))
        flight.enter("preparing", now)
        deadline_s = flight.request.deadline_s
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (now - flight.opened_at))
        if isinstance(flight.request, Encode):
            answered = sorted(flight.answered)
            return replace(flight.request, id=id, deadline_s=deadline_s, answered=answered)
        progress: dict[str, Any] = {"resume": list(flight.tokens), "scored": flight.scored}
        if flight.reuse is not None:
            progress["left_out"] = flight.reuse.left_out  # another worker might choose differently
        return replace(flight.request, id=id, deadline_s=deadline_s, **progress)

    def _begin(self, flight: Flight, attempt: Attempt) -> None:
        flight.attempt, flight.former, flight.was_placed = attempt, None, True
        del self._waiting[flight.id]
        self._by_attempt.setdefault(attempt.worker, {})[attempt.id] = flight

    def adopt(self, flight: Flight, now: float) -> None:
        """Go on with the former attempt of a waiting flight, whose worker still has it."""
        attempt = flight.former
        assert attempt is not None
        attempt.began_at, attempt.missed_heartbeats = now, 0
        self._begin(flight, attempt)
        flight.enter("decode" if attempt.deltas else "waiting", now)

    def leave(self, flight: Flight, now: float, *, may_return: bool = False) -> None:
        """End the present attempt; the flight waits for another one, unless it has ended.

        `may_return`: its worker may still run it, and be asked to go on.
        """
        flight.former = flight.attempt if may_return else None
        self._forget_attempt(flight)
        if flight.terminal is None:
            flight.waiting_since = now
            flight.enter("paused", now)
            self._waiting[flight.id] = flight

    def _forget_attempt(self, flight: Flight) -> None:
        if flight.attempt is not None:
            assigned = self._by_attempt[flight.attempt.worker]
            del assigned[flight.attempt.id]
            if not assigned:
                del self._by_attempt[flight.attempt.worker]
            flight.attempt = None

    def close(self, flight: Flight) -> None:
        """Remove a flight. Idempotent."""
        self._forget_attempt(flight)
        self._waiting.pop(flight.id, None)
        self._by_id.pop(flight.id, None)

    def find(self, attempt: str, worker: str) -> Flight | None:
        """Return the flight whose present attempt at `worker` has this id."""
        return self._by_attempt.get(worker, {}).get(attempt)

    def attempts(self, worker: str) -> Collection[str]:
        """Return the ids of a worker's present attempts."""
        return self._by_attempt.get(worker, {}).keys()

    def assigned(self, worker: str) -> list[Flight]:
        """Return the unfinished flights of a worker, in the order of their dispatch."""
        return [f for f in self._by_attempt.get(worker, {}).values() if f.terminal is None]

    def waiting(self, model: str | None = None) -> list[Flight]:
        """Return the flights that wait for a worker (of `model`; None: of any), oldest first."""
        return [f for f in self._waiting.values() if f.terminal is None and model in (None, f.model)]
