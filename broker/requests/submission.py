"""Submission of requests to the dispatcher, with the concurrency limit per key and the queue timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from broker.dispatch.admission import has_begun
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import UnloadedModel, Worker
from broker.dispatch.flight import Flight
from broker.middleware.limits import KeyConcurrency
from protocol.common.api_keys import ApiKey
from protocol.errors import Code, RequestError
from protocol.messages import Request


def check_room(dispatcher: Dispatcher) -> None:
    """Raise `RequestError(text_generation_busy)` if every request would be rejected, before reading the body.

    A model without a worker counts as having room.
    """
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
class Submission:
    """Wrapper of `Dispatcher.submit` that enforces the limits. `queue_timeout_s`: None for no timeout."""

    dispatcher: Dispatcher
    key_concurrency: KeyConcurrency
    queue_timeout_s: float | None

    @contextmanager
    def submit(
        self,
        key: ApiKey | None,
        found: Worker | UnloadedModel,
        requests: Sequence[Request],
        media: Sequence[bytes],
    ) -> Iterator[list[Flight]]:
        """Submit all requests of one client, or none. On the event loop.

        Raises `RequestError`. On exit it also replaces the bare error of a flight that exceeded the queue
        timeout with one that has details.
        """
        admission = self.dispatcher.admission
        held = self.key_concurrency.held(key, len(requests), admission.retry_after_s)
        with held, self.dispatcher.submit(found, requests, media) as flights:
            for flight in flights:
                flight.key = key.name if key else ""
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
    """Queue timeout of a request: ends when its first flight begins."""

    def __init__(self, dispatcher: Dispatcher, model: str, flights: Sequence[Flight]) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._flights = flights
        self.refusal: RequestError | None = None

    def end(self, waited_s: float) -> None:
        """Fail the flights, unless one has begun or ended."""
        if any(has_begun(flight) or flight.terminal is not None for flight in self._flights):
            return
        open = (flight for flight in self._dispatcher.flights if flight.terminal is None)
        assigned = [flight for flight in open if flight.model == self._model]
        why = f"The server did not start this request within {waited_s:g} s"
        self.refusal = self._dispatcher.admission.busy(assigned, why)
        for flight in self._flights:
            self._dispatcher.give_up(flight, Code.TEXT_GENERATION_BUSY, self.refusal.message)
