"""Asynchronous reader of flights' outputs: waits without a queue, a lock or a timer per item."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from broker.dispatch.flight import Batch, Flight

Aside = Callable[[Callable[[], list[Batch]]], bool]
"""Forwards outputs without waking the waiter. Its argument takes everything that has arrived. It returns
False if the waiter must check, whether or not the outputs were taken."""


class PassingError(RuntimeError):
    """Raised when `offload` has failed."""


class OutputReader:
    """Reader of the outputs of a request's flights, for one waiter at a time.

    With `offload` set, the waiter sleeps while that forwards outputs, once per iteration of the event loop.
    """

    def __init__(self, flights: Sequence[Flight]) -> None:
        self._flights = flights
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_due = False
        self._passed_at = 0.0
        self.offload: Aside | None = None
        self.client_gone = False
        for flight in flights:
            flight.on_item = self.wake

    def wake(self) -> None:
        """Signal that a flight has a new item."""
        if self._waiter is None or self._waiter.done():
            return  # a reader that is awake checks by itself
        if self.offload is None:
            self._waiter.set_result(None)
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._pass_on, self.offload, self._waiter)

    def leave(self) -> None:
        """Signal that the client has disconnected; the waiter should stop."""
        self.client_gone = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pass_on(self, offload: Aside, waiter: asyncio.Future[None]) -> None:
        self._is_due = False
        if waiter is not self._waiter or waiter.done():
            return
        passed: bool | None = None
        try:
            passed = self._is_under_way and offload(self._take)
        finally:
            if passed is None:  # the loop logs the cause; the taken items are lost, so the request fails
                waiter.set_exception(PassingError("outputs could not be forwarded to the client"))
        if passed:
            self._passed_at = self._loop.time()
        else:
            self._wake_reader()

    @property
    def _is_under_way(self) -> bool:
        """Whether items have arrived, but no flight's end. Otherwise the waiter must check."""
        pending = [flight for flight in self._flights if flight.pending]
        return bool(pending) and all(flight.pending[-1] is not flight.terminal for flight in pending)

    def _take(self) -> list[Batch]:
        return [(choice, flight.take()) for choice, flight in enumerate(self._flights) if flight.pending]

    async def batches(self, timeout_s: float | None = None) -> list[Batch]:
        """Wait for at least one item and return all that have arrived.

        Returns an empty list when the client has disconnected, when `offload` has taken the items, or when
        nothing arrived or was forwarded for `timeout_s`. Raises `PassingError`.
        """
        if not self.client_gone and not any(flight.pending for flight in self._flights):
            await self._wait(timeout_s)
        return [] if self.client_gone else self._take()

    async def _wait(self, timeout_s: float | None) -> None:
        self._waiter, self._passed_at = self._loop.create_future(), self._loop.time()
        timer: asyncio.TimerHandle | None = None

        def poll() -> None:
            """Rearm one timer for the remaining time, instead of one timer per forwarded item."""
            nonlocal timer
            left_s = self._passed_at + (timeout_s or 0.0) - self._loop.time()
            if left_s > 0:
                timer = self._loop.call_later(left_s, poll)
            else:
                self._wake_reader()

        if timeout_s is not None:
            poll()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
