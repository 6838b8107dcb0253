"""Adapters of the models, as requests may name them. Pure.

Workers report the adapters that they have, and get orders to load and unload others. This is the only
place that knows which adapters a model is to have: a worker that lacks one is told to load it, so that
successors of a dead worker, and further workers of a model, serve the same adapters.

An adapter that is removed gets no new requests. Those that use it finish first, on other workers too; then
all workers unload it, and its name may be used again. It stays removed although a successor loads it from its
own settings, as long as this gateway runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from broker.dispatch.fleet import Fleet, Worker
from broker.dispatch.flights import Flights
from protocol.adapters import ADAPTERS_MAX, SEPARATOR
from protocol.errors import Code, RequestError, adapter_not_found
from protocol.messages import AdaptersChanged, LoadAdapter, Message, UnloadAdapter
from protocol.types import AdapterInfo

log = logging.getLogger(__name__)

Tell = Callable[[str, Message], bool]
"""(incarnation, message) -> whether it was queued for sending."""


@dataclass(slots=True, eq=False)
class AdapterLoad:
    """An order to load an adapter. `awaited`: workers that have not replied yet."""

    model: str
    name: str
    awaited: set[str]
    info: AdapterInfo | None = None
    error: str = ""
    on_over: Callable[[], None] = lambda: None

    @property
    def is_over(self) -> bool:
        return not self.awaited or bool(self.error)


@dataclass(slots=True)
class ModelAdapters:
    """The adapters of one model. `known`: requests may use them. `leaving`: removed, but in use. `removed`:
    names that workers are not to load from their settings."""

    known: dict[str, AdapterInfo] = field(default_factory=dict)
    leaving: dict[str, AdapterInfo] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    loading: dict[str, AdapterLoad] = field(default_factory=dict)


class AdapterCatalogue:
    """The adapters of all models."""

    def __init__(self, incarnation: str, fleet: Fleet, flights: Flights, tell: Tell) -> None:
        self._incarnation = incarnation
        self._fleet = fleet
        self._flights = flights
        self._tell = tell
        self._models: dict[str, ModelAdapters] = {}

    def _of(self, model: str) -> ModelAdapters:
        return self._models.setdefault(model, ModelAdapters())

    # --- requests ---

    def known(self, model: str) -> list[AdapterInfo]:
        """Return the adapters of a model that requests may use, by name."""
        found = self._models.get(model)
        return [found.known[name] for name in sorted(found.known)] if found else []

    def leaving(self, model: str) -> list[AdapterInfo]:
        """Return the removed adapters that requests still use, by name."""
        found = self._models.get(model)
        return [found.leaving[name] for name in sorted(found.leaving)] if found else []

    def split(self, asked: str, resolve: Callable[[str], str]) -> tuple[str, str]:
        """Split MODEL:NAME, if MODEL is one; else return `asked` without an adapter. `resolve`: resolves
        aliases."""
        base, colon, name = asked.rpartition(SEPARATOR)
        model = resolve(base)
        if not colon or model not in self._fleet.models:
            return asked, ""
        whole = resolve(asked)
        is_adapter = whole not in self._fleet.models or (whole == model and name in self._of(model).known)
        return (base, name) if is_adapter else (asked, "")

    def require(self, model: str, name: str) -> None:
        """Raise `RequestError` if requests cannot name this adapter. Those of a model that was never loaded
        are not known: its worker decides."""
        entry = self._fleet.models.get(model)
        if name and name not in self._of(model).known and entry is not None and entry.last is not None:
            raise adapter_not_found(model, name)

    # --- orders of an operator ---

    @contextmanager
    def load(self, model: str, name: str, folder: str) -> Iterator[AdapterLoad]:
        """Have all workers of a model load an adapter. While the context is open, their replies are
        collected. It is served if all have loaded it when the context is left, or else removed again.

        Raises `RequestError` if the name is in use, there are too many, or no worker serves the model.
        """
        ours = self._of(model)
        if name in ours.known or name in ours.loading or name in ours.leaving:
            state = "is still in use by running requests" if name in ours.leaving else "exists already"
            raise _refused(f"The adapter `{name}` of `{model}` {state}.")
        if len(ours.known) + len(ours.loading) >= ADAPTERS_MAX:
            raise _refused(f"The model `{model}` has {ADAPTERS_MAX} adapters, the maximum.")
        serving = [worker for worker in self._fleet if worker.fit and worker.model == model]
        if not serving:
            raise RequestError(Code.WORKER_UNAVAILABLE, retry_after_s=2.0)
        order = AdapterLoad(model, name, {worker.incarnation for worker in serving})
        ours.loading[name] = order
        try:
            for worker in serving:
                self._send_load(worker, name, folder)
            yield order
        finally:
            del ours.loading[name]
            self._settle(order)

    def _settle(self, order: AdapterLoad) -> None:
        ours = self._of(order.model)
        if order.info is not None and not order.error and not order.awaited:
            ours.known[order.name] = order.info
            ours.removed.discard(order.name)
            for worker in self._workers(order.model):  # some have become ready meanwhile
                self._complete(worker)
            return
        for worker in self._workers(order.model):
            # Behind the order to load it, in case that is still to come.
            if order.name in worker.awaited_adapters or order.name in worker.adapters:
                self._send_unload(worker, order.name)

    def remove(self, model: str, name: str) -> int:
        """Remove an adapter; return the number of requests that still use it. Raises `RequestError`."""
        ours = self._of(model)
        if name not in ours.known:
            raise adapter_not_found(model, name)
        ours.leaving[name] = ours.known.pop(name)
        ours.removed.add(name)
        users = self._users(model, name)
        self.sweep()
        return users

    # --- events ---

    def on_ready(self, worker: Worker) -> None:
        """Learn the adapters of a worker that has become ready, and give it those that it lacks."""
        ours = self._of(worker.model)
        for name, info in worker.adapters.items():
            if name in ours.leaving or name in ours.loading:
                continue
            if name in ours.removed:
                self._send_unload(worker, name)
            elif not worker.stands_in:
                ours.known[name] = info
        self._complete(worker)

    def on_changed(self, worker: Worker, message: AdaptersChanged) -> None:
        """Handle a worker's reply to an order."""
        if worker.ready is not None:
            worker.ready = replace(worker.ready, adapters=message.adapters)
        info = worker.adapters.get(message.name)
        if info is None and not message.error:
            return  # it was unloaded
        worker.awaited_adapters.discard(message.name)
        order = self._of(worker.model).loading.get(message.name)
        if order is None:
            if message.error:
                log.error("%s: adapter %s: %s", worker.model, message.name, message.error)
            return
        order.info = info or order.info
        order.error = order.error or message.error
        self._answered(order, worker.incarnation)

    def on_lost(self, worker: Worker) -> None:
        """Expect no replies of a lost worker; its successor gets the adapters."""
        for order in list(self._of(worker.model).loading.values()):
            if worker.incarnation in order.awaited:
                if len(order.awaited) == 1 and order.info is None:
                    order.error = "its worker was lost"
                self._answered(order, worker.incarnation)

    def sweep(self) -> None:
        """Unload removed adapters that no request uses any more."""
        for model, ours in self._models.items():
            for name in [name for name in ours.leaving if not self._users(model, name)]:
                del ours.leaving[name]
                for worker in self._workers(model):
                    if name in worker.adapters or name in worker.awaited_adapters:
                        self._send_unload(worker, name)

    def _answered(self, order: AdapterLoad, incarnation: str) -> None:
        order.awaited.discard(incarnation)
        if order.is_over:
            order.on_over()

    # --- helpers ---

    def _workers(self, model: str) -> Collection[Worker]:
        return [worker for worker in self._fleet if worker.ready is not None and worker.model == model]

    def _users(self, model: str, name: str) -> int:
        return sum(
            flight.model == model and flight.adapter == name and flight.terminal is None
            for flight in self._flights
        )

    def _complete(self, worker: Worker) -> None:
        """Have a worker load what it lacks. A stand-in has other weights, and a set of ranks no adapters."""
        if worker.stands_in or worker.plan:
            return
        ours = self._of(worker.model)
        for info in (*ours.known.values(), *ours.leaving.values()):
            if info.name not in worker.adapters and info.folder:
                self._send_load(worker, info.name, info.folder)

    def _send_load(self, worker: Worker, name: str, folder: str) -> None:
        worker.awaited_adapters.add(name)
        self._tell(worker.incarnation, LoadAdapter(incarnation=self._incarnation, name=name, folder=folder))

    def _send_unload(self, worker: Worker, name: str) -> None:
        worker.awaited_adapters.discard(name)
        self._tell(worker.incarnation, UnloadAdapter(incarnation=self._incarnation, name=name))


def _refused(message: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, message, param="lora_name")
