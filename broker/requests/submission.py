"""Submission of requests to the dispatcher, with the concurrency limit per key and the queue timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from broker.dispatch.admission import has_begun
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import UnloadedModel, Worker
from broker.dispatch.flight import Flight
from broker.middleware.limits import KeyConcurrency
from protocol.common.api_keys import ApiKey
from protocol.errors import RequestError
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
        refuse: Callable[[RequestError], None],
    ) -> Iterator[list[Flight]]:
        """Submit all requests of one client, or none. On the event loop.

        `refuse`: called if none of them begins in time. Raises `RequestError`.
        """
        admission = self.dispatcher.admission
        held = self.key_concurrency.held(key, len(requests), admission.retry_after_s)
        with held, self.dispatcher.submit(found, requests, media) as flights:
            for flight in flights:
                flight.key = key.name if key else ""
            timer = None
            if self.queue_timeout_s is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self.queue_timeout_s, self._end_wait, found.model, flights, refuse)
            try:
                yield flights
            finally:
                if timer is not None:
                    timer.cancel()

    def _end_wait(
        self, model: str, flights: Sequence[Flight], refuse: Callable[[RequestError], None]
    ) -> None:
        """Refuse the request, unless one of its flights has begun or ended."""
        if any(has_begun(flight) or flight.terminal is not None for flight in flights):
            return
        open = (flight for flight in self.dispatcher.flights if flight.terminal is None)
        assigned = [flight for flight in open if flight.model == model]
        why = f"The server did not start this request within {self.queue_timeout_s:g} s"
        refusal = self.dispatcher.admission.busy(assigned, why)
        refuse(refusal)
        for flight in flights:
            self.dispatcher.give_up(flight, refusal.code, refusal.message)
