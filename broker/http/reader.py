"""The event loop's end of flights: wait for items without a queue, a lock or a timer per item."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from broker.dispatch.flight import Batch, Flight

Aside = Callable[[Callable[[], list[Batch]]], bool]
"""Is given what takes all that has come, and may pass it on without the waiter. False: the waiter should
look, whether it has been taken or not."""


class PassingError(RuntimeError):
    """`aside` has failed."""


class Reader:
    """Waits for the items of a request's flights. One waiter at a time.

    With `aside` the waiter sleeps while that passes on what comes, once in a round of the loop.
    """

    def __init__(self, flights: Sequence[Flight]) -> None:
        self._flights = flights
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_due = False
        self._passed_at = 0.0
        self.aside: Aside | None = None
        self.client_gone = False
        for flight in flights:
            flight.on_item = self.wake

    def wake(self) -> None:
        """Something came."""
        if self._waiter is None or self._waiter.done():
            return  # whoever is awake will look
        if self.aside is None:
            self._waiter.set_result(None)
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._pass_on, self.aside, self._waiter)

    def leave(self) -> None:
        """The client has gone; the waiter should stop."""
        self.client_gone = True
        self._rouse()

    def _rouse(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pass_on(self, aside: Aside, waiter: asyncio.Future[None]) -> None:
        self._is_due = False
        if waiter is not self._waiter or waiter.done():
            return
        passed: bool | None = None
        try:
            passed = self._is_under_way and aside(self._take)
        finally:
            if passed is None:  # the loop logs why; what was taken is lost, and so is the request
                waiter.set_exception(PassingError("what has come could not be passed on"))
        if passed:
            self._passed_at = self._loop.time()
        else:
            self._rouse()

    @property
    def _is_under_way(self) -> bool:
        """Something has come, and no flight's end, which comes last. Who calls without is to be looked at."""
        pending = [flight for flight in self._flights if flight.pending]
        return bool(pending) and all(flight.pending[-1] is not flight.terminal for flight in pending)

    def _take(self) -> list[Batch]:
        return [(choice, flight.take()) for choice, flight in enumerate(self._flights) if flight.pending]

    async def batches(self, timeout_s: float | None = None) -> list[Batch]:
        """Everything that has come, at least one item; empty when the client left, when nothing came, nor was
        passed on, for `timeout_s`, or when `aside` has taken it. Raises `PassingError`."""
        if not self.client_gone and not any(flight.pending for flight in self._flights):
            await self._wait(timeout_s)
        return [] if self.client_gone else self._take()

    async def _wait(self, timeout_s: float | None) -> None:
        self._waiter, self._passed_at = self._loop.create_future(), self._loop.time()
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            """One timer for all that is passed on meanwhile: it is set again for what is left."""
            nonlocal timer
            left_s = self._passed_at + (timeout_s or 0.0) - self._loop.time()
            if left_s > 0:
                timer = self._loop.call_later(left_s, look)
            else:
                self._rouse()

        if timeout_s is not None:
            look()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
