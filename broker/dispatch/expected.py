"""Expected workers: those that outlived the gateway before this one, and have not connected yet. Pure.

Workers connect within a moment of a gateway's start, or its requests would be refused though nothing is
wrong. So for a short time, requests wait for a model of which the supervisor says that a worker has loaded
it, or, where there is none, of which the journal says that it was served last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from broker.dispatch.fleet import Fleet, ModelEntry, UnloadedModel, unseen
from broker.dispatch.flight import Flight
from protocol.errors import RequestError
from protocol.messages import Ready
from protocol.tasks import Task, tasks

CONNECT_S_MAX = 10.0
"""Time in seconds from the gateway's start for workers to connect."""


class ExpectedWorkers:
    """The models whose workers are expected."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._until = clock() + CONNECT_S_MAX
        self._models: dict[str, Ready] = {}
        """What is known of each: the `Ready` of its last worker, or assumptions."""
        self._waiting: set[Flight] = set()

    def add(self, model: str, ready: Ready | None = None) -> None:
        """Expect a worker of `model`. `ready`: that of its last one, if it is known."""
        if self._clock() < self._until and all(worker.model != model for worker in self._fleet):
            self._models[model] = ready or self._models.get(model) or unseen(model)
            self._fleet.models.setdefault(model, ModelEntry(first_seen_at=self._clock()))

    def find(self, model: str | None, task: Task) -> UnloadedModel | None:
        """Return the model if its worker is expected. None as `model`: any model, if no worker serves yet."""
        if model is None and any(worker.serves for worker in self._fleet):
            return None
        for name, ready in self._models.items():
            if model == name or (model is None and task in tasks(ready.capabilities)):
                return UnloadedModel(name, ready)
        return None

    def forget(self, model: str) -> None:
        """Expect no worker of `model`: one has connected, or there is none."""
        self._models.pop(model, None)

    def note(self, model: str, flights: Iterable[Flight]) -> None:
        """Note new flights, which wait if a worker of `model` is expected."""
        if model in self._models:
            self._waiting.update(flights)

    def sweep(self, find: Callable[[str], object]) -> list[str]:
        """Forget the models whose workers had the time to connect, and have not; return them.

        Fails the flights that would be refused now, because of that or because their worker loads its model
        anew. `find`: raises `RequestError` for a model that is not served.
        """
        is_over = self._clock() >= self._until
        late = self._forget_late() if is_over else []
        for flight in list(self._waiting):
            if flight.was_placed or flight.terminal is not None:
                self._waiting.discard(flight)
                continue
            try:
                find(flight.model)
            except RequestError as refusal:
                flight.fail(refusal.code, refusal.message)
        if is_over:  # what is left has been refused, is placed by now, or its client has left
            self._waiting.clear()
        return late

    def _forget_late(self) -> list[str]:
        late, self._models = list(self._models), {}
        for model in late:
            if self._fleet.models[model].last is None:  # nothing else has it
                del self._fleet.models[model]
        return late
