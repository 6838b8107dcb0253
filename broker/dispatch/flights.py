"""All requests in flight, by who carries them. Pure: no sockets, no asyncio, the clock handed in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from broker.dispatch.flight import Flight, Leg
from protocol.messages import Embed, Rank, Request


class Flights:
    """All flights, by id and by the worker they are aboard."""

    def __init__(self) -> None:
        self._by_id: dict[str, Flight] = {}
        self._by_leg: dict[str, dict[str, Flight]] = {}
        self._waiting: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._by_id.values()))

    def open(self, request: Request, model: str, now: float, media: Sequence[bytes] = ()) -> Flight:
        """A flight that waits for a worker."""
        if request.id in self._by_id:
            raise ValueError(f"flight {request.id} is open already")
        flight = Flight(request, model, opened_at=now, waiting_since=now, media=media)
        self._by_id[request.id] = self._waiting[request.id] = flight
        return flight

    def board(self, flight: Flight, worker: str, now: float) -> Request:
        """A new leg of a flight that waits; the message that begins it."""
        assert flight.leg is None
        flight.legs += 1
        # Nobody can mistake what is still said of an earlier leg for news of this one.
        id = flight.id if flight.legs == 1 else f"{flight.id}~{flight.legs}"
        flight.leg = Leg(id, worker, began_at=now)
        del self._waiting[flight.id]
        self._by_leg.setdefault(worker, {})[id] = flight
        deadline_s = flight.request.deadline_s
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (now - flight.opened_at))
        if isinstance(flight.request, Embed | Rank):
            answered = sorted(flight.answered)
            return replace(flight.request, id=id, deadline_s=deadline_s, answered=answered)
        told: dict[str, Any] = {"resume": list(flight.tokens), "scored": flight.scored}
        if flight.reuse is not None:
            told["left_out"] = flight.reuse.left_out  # another worker might choose other parts
        return replace(flight.request, id=id, deadline_s=deadline_s, **told)

    def leave(self, flight: Flight, now: float) -> None:
        """Its leg is over; the flight waits for another one, unless it has ended."""
        self._forget_leg(flight)
        if flight.terminal is None:
            flight.waiting_since = now
            self._waiting[flight.id] = flight

    def _forget_leg(self, flight: Flight) -> None:
        if flight.leg is not None:
            aboard = self._by_leg[flight.leg.worker]
            del aboard[flight.leg.id]
            if not aboard:
                del self._by_leg[flight.leg.worker]
            flight.leg = None

    def close(self, flight: Flight) -> None:
        """Idempotent."""
        self._forget_leg(flight)
        self._waiting.pop(flight.id, None)
        self._by_id.pop(flight.id, None)

    def find(self, leg: str, worker: str) -> Flight | None:
        """The flight `worker` may speak about under this id."""
        return self._by_leg.get(worker, {}).get(leg)

    def legs(self, worker: str) -> Collection[str]:
        """What a worker was sent and may still speak about."""
        return self._by_leg.get(worker, {}).keys()

    def aboard(self, worker: str) -> list[Flight]:
        """Flights of a worker that have not ended, in the order they boarded."""
        return [f for f in self._by_leg.get(worker, {}).values() if f.terminal is None]

    def waiting(self, model: str | None = None) -> list[Flight]:
        """Flights that are aboard no worker (of `model`; None: of any), those who came first in front."""
        return [f for f in self._waiting.values() if f.terminal is None and model in (None, f.model)]
