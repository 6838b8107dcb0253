"""How a client's request comes aboard: within what its key may have, and not to wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from broker.dispatch.admission import has_begun
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import Vacancy, Worker
from broker.dispatch.flight import Flight
from broker.http.auth import Key
from broker.http.limits import Shares
from protocol.errors import Code, RequestError
from protocol.messages import Request


def check_room(dispatcher: Dispatcher) -> None:
    """Raises `RequestError(text_generation_busy)` where whoever asks would be refused, whatever he asks: who
    knows that need not read his request. A model that nobody serves may have room."""
    fleet = dispatcher.fleet
    serving = [(worker, worker.ready) for worker in fleet if worker.serves and worker.ready is not None]
    if not serving or {worker.model for worker, _ in serving} != fleet.models.keys():
        return
    if len(dispatcher.flights) < min(ready.running_max for _, ready in serving):
        return
    present = {worker: dispatcher.present(worker) for worker, _ in serving}
    if all(dispatcher.admission.is_full(present[worker], ready) for worker, ready in serving):
        raise dispatcher.admission.busy(max(present.values(), key=len))


@dataclass(frozen=True, slots=True)
class Boarding:
    """`Dispatcher.board` under the limits of the house. `queue_timeout_s`: None: wait as long as it takes."""

    dispatcher: Dispatcher
    shares: Shares
    queue_timeout_s: float | None

    @contextmanager
    def board(
        self,
        key: Key | None,
        found: Worker | Vacancy,
        requests: Sequence[Request],
        media: Sequence[bytes],
    ) -> Iterator[list[Flight]]:
        """All of one client's requests, or none. On the event loop.

        Raises `RequestError`, also in the end: in place of the error without details that a flight brings
        which has waited too long.
        """
        admission = self.dispatcher.admission
        held = self.shares.held(key.digest if key else None, len(requests), admission.retry_after_s)
        with held, self.dispatcher.board(found, requests, media) as flights:
            wait = _Wait(self.dispatcher, found.model, flights)
            timer = None
            if self.queue_timeout_s is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self.queue_timeout_s, wait.end, self.queue_timeout_s)
            try:
                yield flights
            except RequestError as error:
                if wait.refusal is not None and error.code is wait.refusal.code:
                    raise wait.refusal from None
                raise
            finally:
                if timer is not None:
                    timer.cancel()


class _Wait:
    """A client's wait for the first of its flights to begin."""

    def __init__(self, dispatcher: Dispatcher, model: str, flights: Sequence[Flight]) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._flights = flights
        self.refusal: RequestError | None = None

    def end(self, waited_s: float) -> None:
        """It has taken too long, unless it is over."""
        if any(has_begun(flight) or flight.terminal is not None for flight in self._flights):
            return
        open = (flight for flight in self._dispatcher.flights if flight.terminal is None)
        aboard = [flight for flight in open if flight.model == self._model]
        why = f"The server did not get to this request within {waited_s:g} s"
        self.refusal = self._dispatcher.admission.busy(aboard, why)
        for flight in self._flights:
            self._dispatcher.give_up(flight, Code.TEXT_GENERATION_BUSY, self.refusal.message)
