"""Fan-out of a request to clear the prefix caches to all serving workers. Pure.

It is complete when every worker has replied, or as soon as one of them has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from protocol.messages import CacheCleared


@dataclass(slots=True, eq=False)
class CacheClear:
    """One clear request. `awaited`: incarnation -> model of the workers that have not replied yet."""

    awaited: dict[str, str]
    freed: list[tuple[str, CacheCleared]] = field(default_factory=list)
    """Replies, each with the model of the worker."""
    died: str | None = None
    """The model of a worker that died before it replied."""
    on_over: Callable[[], None] = lambda: None

    @property
    def over(self) -> bool:
        return not self.awaited or self.died is not None

    def answer(self, message: CacheCleared) -> bool:
        """Record a worker's reply. Return False if none was expected from it."""
        model = self.awaited.pop(message.incarnation, None)
        if model is None:
            return False
        self.freed.append((model, message))
        self._tell()
        return True

    def lose(self, incarnation: str) -> None:
        """Record that a worker is lost."""
        model = self.awaited.pop(incarnation, None)
        if model is not None:
            self.died = model
            self._tell()

    def _tell(self) -> None:
        if self.over:
            self.on_over()


class CacheClears:
    """Pending clear requests, by id."""

    def __init__(self) -> None:
        self._open: dict[str, CacheClear] = {}

    @contextmanager
    def open(self, id: str, awaited: Mapping[str, str]) -> Iterator[CacheClear]:
        """Open a clear request for the duration of the context."""
        self._open[id] = CacheClear(dict(awaited))
        try:
            yield self._open[id]
        finally:
            del self._open[id]

    def answer(self, message: CacheCleared) -> bool:
        """Pass on a worker's reply. Return False if none was expected."""
        cache_clear = self._open.get(message.id)
        return cache_clear is not None and cache_clear.answer(message)

    def lose(self, incarnation: str) -> None:
        """Record in all clear requests that a worker is lost."""
        for cache_clear in self._open.values():
            cache_clear.lose(incarnation)
