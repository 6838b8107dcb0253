"""The event loop's end of flights: wait for items without a queue, a lock or a timer per item."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from broker.dispatch.flight import Batch, Flight


class Reader:
    """Waits for the items of a request's flights. One waiter at a time."""

    def __init__(self, flights: Sequence[Flight]) -> None:
        self._flights = flights
        self._waiter: asyncio.Future[None] | None = None
        self.client_gone = False
        for flight in flights:
            flight.on_item = self.wake

    def wake(self) -> None:
        """Let the waiter look: something came, or it should say that it is still there."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self) -> None:
        """The client has gone; the waiter should stop."""
        self.client_gone = True
        self.wake()

    async def batches(self, timeout_s: float | None = None) -> list[Batch]:
        """Everything that has come, at least one item; empty when the client left or `timeout_s` passed."""
        if not self.client_gone and not any(flight.pending for flight in self._flights):
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self.wake) if timeout_s is not None else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        if self.client_gone:
            return []
        return [(choice, flight.take()) for choice, flight in enumerate(self._flights) if flight.pending]
