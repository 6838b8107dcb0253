"""The event loop's end of a flight: wait for items without a queue, a lock or a timer per item."""

from __future__ import annotations

import asyncio

from broker.inflight import Flight, Item


class Reader:
    """Waits for a flight's items. One waiter at a time."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._waiter: asyncio.Future[None] | None = None
        self.client_gone = False
        flight.on_item = self.wake

    def wake(self) -> None:
        """Let the waiter look: something came, or it should say that it is still there."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self) -> None:
        """The client has gone; the waiter should stop."""
        self.client_gone = True
        self.wake()

    async def items(self, timeout_s: float | None = None) -> list[Item]:
        """Everything that has come, at least one item; empty when the client left or `timeout_s` passed."""
        if not self._flight.pending and not self.client_gone:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self.wake) if timeout_s is not None else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return [] if self.client_gone else self._flight.take()
