"""Queue of deferred work: responses in the background and lines of batches, which wait for a free row. Pure.

A row is free if no request has it that a client waits for, and none waits for one. Responses come first,
then lines of batches, each the oldest first. Lines give way, so their rows count as free. Invariants:

* a response starts only in a free row, so it is never refused for want of one;
* lines in flight are at most as many as free rows, and `SPARE_SHARE` of that;
* what is refused is tried again after a delay that doubles, and nothing of its source overtakes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import UnloadedModel
from protocol.errors import RequestError

SPARE_SHARE = 0.5
"""Lines in flight beyond the free rows, so that the next ones are prepared when a row is free."""
RETRY_S, RETRY_S_MAX = 1.0, 30.0
"""First and longest delay in seconds until a source that was refused is tried again."""


@dataclass(slots=True, eq=False)
class WorkSource:
    """FIFO queue of work that is refused alike: responses of one owner and model, or the lines of a batch."""

    start: Callable[[Any], bool]
    """Starts the first. False: there is no memory for it. Raises `RequestError` to be tried again."""
    since: Callable[[Any], float]
    """Returns the time since when a response waits, or a line's batch."""
    model: str | None = None
    """The model of responses; None: lines of a batch, which may name several."""
    is_over: Callable[[Any, float], bool] = lambda work, now: False
    """Returns whether a response waits no more."""
    waiting: deque[Any] = field(default_factory=deque)
    in_flight: int = 0
    """Lines that are sent, and whose results are not on the disk yet."""
    retry_s: float = RETRY_S
    retry_at: float = 0.0


class DeferredQueue:
    """Queue of a gateway. For use on the event loop. `free_rows`: those of a model; None: of all."""

    def __init__(self, free_rows: Callable[[str | None], int], clock: Callable[[], float]) -> None:
        self.sources: dict[Hashable, WorkSource] = {}
        self.clock = clock
        self._free_rows = free_rows

    @property
    def responses(self) -> int:
        """Number of responses that wait."""
        return sum(len(source.waiting) for source in self.sources.values() if source.model is not None)

    @property
    def lines(self) -> int:
        """Number of lines in flight."""
        return sum(source.in_flight for source in self.sources.values())

    def pump(self) -> None:
        """Start what can begin now. Call this when work is new."""
        while self._start_first():
            pass

    def freed(self) -> None:
        """Start what can begin now that a request has ended, refused responses included."""
        for source in self.sources.values():
            if source.model is not None:
                source.retry_at, source.retry_s = 0.0, RETRY_S
        self.pump()

    def sweep(self) -> None:
        """Drop responses that wait no more, and start what can begin now. Call this a few times a second."""
        now = self.clock()
        for name, source in list(self.sources.items()):
            if source.model is not None:
                source.waiting = deque(work for work in source.waiting if not source.is_over(work, now))
                if not source.waiting:
                    del self.sources[name]
        self.pump()

    def refuse(self, source: WorkSource) -> None:
        """Try a source again after a while, which doubles each time."""
        if (now := self.clock()) >= source.retry_at:
            source.retry_at = now + source.retry_s
            source.retry_s = min(RETRY_S_MAX, 2 * source.retry_s)

    def _start_first(self) -> bool:
        """Start the first that can begin. Return False if none can."""
        free_rows = cache(self._free_rows)
        waiting = [source for source in self.sources.values() if source.waiting]
        for source in sorted(waiting, key=lambda each: (each.model is None, each.since(each.waiting[0]))):
            free = free_rows(source.model)
            has_room = self.lines < free + int(free * SPARE_SHARE) if source.model is None else free > 0
            if not has_room or self.clock() < source.retry_at:
                continue
            try:
                is_started = source.start(source.waiting[0])
            except RequestError:
                self.refuse(source)
                continue
            if is_started:
                source.waiting.popleft()
            return is_started
        return False


def free_rows(dispatcher: Dispatcher, model: str | None) -> int:
    """Return how many rows of a model are free; one if it can be loaded, none in a gateway that stops: the
    next one begins the work. `model`: None: of all, and at least one, since a line may name another."""
    if dispatcher.stopping:
        return 0
    awaited = {flight.model for flight in dispatcher.flights.waiting(model) if not flight.is_batch}
    serving = [worker for worker in dispatcher.fleet if worker.serves and model in (None, worker.model)]
    free = sum(
        max(0, worker.ready.running_max - len(dispatcher.present(worker)))
        for worker in serving
        if worker.ready is not None and worker.model not in awaited and not worker.refuses_long
    )
    if model is None or serving or awaited:
        return max(free, model is None)
    try:
        return int(isinstance(dispatcher.find(model), UnloadedModel))
    except RequestError:
        return 0
