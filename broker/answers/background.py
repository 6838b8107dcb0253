"""Requests that wait in the background for a free row, the oldest first, behind everything interactive. Pure.

A request leaves the queue when it would begin at once: its model has a free row, and no other request waits
for one. So it never takes a place in the queue of interactive requests, and is never refused for want of one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from broker.answers.answer import Answer
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import UnloadedModel
from protocol.errors import Code, RequestError

log = logging.getLogger(__name__)

BACKGROUND_MAX = 16_384
"""Maximum number of requests that wait."""
WAIT_S_MAX = 86_400.0
"""Longest wait in seconds."""
PRIORITY = 2**20
"""What a request in the background adds to its priority: the smallest is served first."""
_REFUSED_MAX = 64
"""Maximum number of requests that are tried in vain before the next occasion."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    answer: Answer
    model: str
    start: Callable[[], None]
    since: float


class BackgroundQueue:
    """Queue of the requests in the background. For use on the event loop."""

    def __init__(self, has_free_row: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._has_free_row = has_free_row
        self._clock = clock
        self._waiting: dict[Answer, _Waiting] = {}
        self._is_pumping = False

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self) -> None:
        """Raise `RequestError` if no further request may wait."""
        if len(self._waiting) >= BACKGROUND_MAX:
            message = f"{BACKGROUND_MAX} responses are queued in the background already."
            raise RequestError(Code.TEXT_GENERATION_BUSY, message, retry_after_s=60.0)

    def add(self, answer: Answer, model: str, start: Callable[[], None]) -> None:
        """Add a request. `start` opens its flights, or raises `RequestError`."""
        self._waiting[answer] = _Waiting(answer, model, start, self._clock())
        self.pump()

    def pump(self) -> None:
        """Start what can begin now. Call this whenever a row may be free."""
        if self._is_pumping or not self._waiting:
            return
        self._is_pumping = True
        try:
            self._start_some()
        finally:
            self._is_pumping = False

    def _start_some(self) -> None:
        now, full, refused = self._clock(), set[str](), 0
        for waiting in list(self._waiting.values()):
            if waiting.answer.over:
                del self._waiting[waiting.answer]
            elif now - waiting.since > WAIT_S_MAX:
                self._fail(waiting, RequestError(Code.WORKER_UNAVAILABLE, "No row was free for a day."))
            elif waiting.model not in full and refused < _REFUSED_MAX:
                if not self._has_free_row(waiting.model):
                    full.add(waiting.model)
                elif not self._start(waiting):
                    refused += 1

    def _start(self, waiting: _Waiting) -> bool:
        """Start a request. Return False if it has to wait on."""
        try:
            waiting.start()
        except RequestError as error:
            if error.kind.retryable:
                return False
            self._fail(waiting, error)
        self._waiting.pop(waiting.answer, None)
        return True

    def _fail(self, waiting: _Waiting, error: RequestError) -> None:
        log.info("the queued response %s fails: %s", waiting.answer.name, error.message)
        self._waiting.pop(waiting.answer, None)
        waiting.answer.refuse(error)


def has_free_row(dispatcher: Dispatcher, model: str) -> bool:
    """Return whether a request would begin at once: no other waits, and a worker of `model` has a free
    row, or the model can be loaded. Not in a gateway that stops: the next one begins it."""
    if dispatcher.stopping or any(not flight.is_batch for flight in dispatcher.flights.waiting(model)):
        return False
    try:
        found = dispatcher.find(model)
    except RequestError:
        return False
    return isinstance(found, UnloadedModel) or any(
        worker.serves
        and worker.model == found.model
        and worker.ready is not None
        and sum(not flight.is_batch for flight in dispatcher.flights.assigned(worker.incarnation))
        < worker.ready.running_max
        for worker in dispatcher.fleet
    )
