"""Adapters that are loaded and removed while rows run. Their memory is taken from that of the caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.errors import RequestError, adapter_not_found
from protocol.types import AdapterInfo
from worker.core.commands import AddAdapter, RemoveAdapter
from worker.core.publisher import Publisher
from worker.core.scheduler import Scheduler
from worker.interfaces import AdapterError, Model
from worker.values import EngineRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterChanges:
    """Carries out orders about a model's adapters.

    `context_length`: of the longest row, which always fits beside them. `on_change`: called with all adapters
    before a change is published.
    """

    model: Model
    scheduler: Scheduler
    publisher: Publisher
    context_length: int = 0
    on_change: Callable[[Sequence[AdapterInfo]], None] = lambda adapters: None

    @property
    def _infos(self) -> Sequence[AdapterInfo]:
        return self.model.adapters.infos if self.model.adapters else ()

    def require(self, request: EngineRequest) -> None:
        """Raise `RequestError` if the request's adapter was removed while it was prepared."""
        if request.adapter and request.adapter not in {info.name for info in self._infos}:
            raise adapter_not_found(self.model.info.name, request.adapter)

    def carry_out(
        self, order: AddAdapter | RemoveAdapter, fail_row: Callable[[str, RequestError], None]
    ) -> None:
        """Load or remove an adapter, and publish the outcome. Rows that use a removed one fail: the gateway
        removes it when there are none."""
        error = ""
        try:
            if isinstance(order, AddAdapter):
                self._load(order)
            else:
                self._remove(order.name, fail_row)
        except AdapterError as refusal:
            error = str(refusal)
        except Exception as failure:  # the boundary of an order
            log.exception("adapter %s failed", order.name)
            error = f"it failed with {type(failure).__name__}"
        infos = self._infos
        self.scheduler.reservations.set_aside(_bytes_of(infos))
        self.on_change(infos)
        self.publisher.adapters_changed(order.name, error, infos)

    def _load(self, order: AddAdapter) -> None:
        if self.model.adapters is None:
            raise AdapterError("the model serves none, because it runs on several machines or with --exact")
        room = self.scheduler.reservations.room_aside(_bytes_of(self._infos), self.context_length)
        info = self.model.adapters.load(order.name, order.folder, room)
        log.debug("adapter %s is loaded: rank %d, %d bytes", info.name, info.rank, info.bytes)

    def _remove(self, name: str, fail_row: Callable[[str, RequestError], None]) -> None:
        for row in [row for row in self.scheduler if row.request.adapter == name]:
            fail_row(row.id, adapter_not_found(self.model.info.name, name))
        if self.model.adapters is not None:
            self.model.adapters.unload(name)
            log.debug("adapter %s is removed", name)


def _bytes_of(adapters: Sequence[AdapterInfo]) -> int:
    return sum(info.bytes for info in adapters)
