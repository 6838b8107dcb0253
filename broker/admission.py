"""Admitted, or refused at once with a reason and a time to come back. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.inflight import Flight
from protocol.errors import Code, RequestError

RETRY_AFTER_S_MAX = 120.0
_NAMED_MAX = 16
_SMOOTHING = 0.2


class Admission:
    """How many requests a worker may have aboard, and how fast it has been finishing them."""

    def __init__(self, *, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._service_s: float | None = None

    def check(self, aboard: Sequence[Flight], rows_max: int, asked: int = 1) -> None:
        """May `asked` more come to a worker with so many rows, all or none?

        Raises `RequestError(text_generation_busy)`, or `invalid_request` where there would never be room.
        """
        room = rows_max + self._waiting_max
        if len(aboard) + asked <= room:
            return
        if asked > max(room, 1):
            message = f"{asked} answers to one request are asked for, and this server has room for {room}."
            raise RequestError(Code.INVALID_REQUEST, message, param="n")
        raise self.busy(aboard)

    def busy(self, aboard: Sequence[Flight], why: str = "The server is at capacity") -> RequestError:
        """The refusal of a request beside those aboard: who runs, who waits, and when to come back."""
        running = [flight.id for flight in aboard if has_begun(flight)]
        waiting = [flight.id for flight in aboard if not has_begun(flight)]
        return RequestError(
            Code.TEXT_GENERATION_BUSY,
            f"{why}: {len(running)} requests are running and {len(waiting)} are waiting."
            f"{_listed('Running', running)}{_listed('Waiting', waiting)}",
            retry_after_s=self.retry_after_s(len(aboard)),
            details={
                "running": len(running),
                "waiting": len(waiting),
                "running_ids": running[:_NAMED_MAX],
                "waiting_ids": waiting[:_NAMED_MAX],
            },
        )

    def served(self, duration_s: float) -> None:
        """A request finished after so long; the average forgets old ones."""
        if self._service_s is None:
            self._service_s = duration_s
        else:
            self._service_s += _SMOOTHING * (duration_s - self._service_s)

    def retry_after_s(self, aboard: int) -> float:
        """When one of those aboard can be expected to have made room, in whole seconds, at least 1.

        A request's measured time in the house contains its wait, so the time between two departures is
        that time divided by those aboard (Little's law).
        """
        if self._service_s is None:
            return 1.0
        return min(RETRY_AFTER_S_MAX, max(1.0, math.ceil(self._service_s / max(aboard, 1))))


def has_begun(flight: Flight) -> bool:
    """Has the worker taken it out of its queue? What was reused is said then, before the first token."""
    return flight.reuse is not None or flight.started_at is not None


def _listed(label: str, ids: Sequence[str]) -> str:
    if not ids:
        return ""
    more = f" and {len(ids) - _NAMED_MAX} more" if len(ids) > _NAMED_MAX else ""
    return f" {label}: {', '.join(ids[:_NAMED_MAX])}{more}."
