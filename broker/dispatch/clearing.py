"""Orders to forget all prefixes, on their way through the workers that serve. Pure.

One is over when every worker it went to has answered, or as soon as one of them has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from protocol.messages import CacheCleared


@dataclass(slots=True, eq=False)
class Clearing:
    """One such order. `awaited`: incarnation -> model of the workers that have not answered yet."""

    id: str
    awaited: dict[str, str]
    freed: list[tuple[str, CacheCleared]] = field(default_factory=list)
    """What was given back, and by a worker of which model."""
    died: str | None = None
    """The model of a worker that died before it answered."""
    on_over: Callable[[], None] = lambda: None

    @property
    def over(self) -> bool:
        return not self.awaited or self.died is not None

    def answer(self, message: CacheCleared) -> bool:
        """False for an answer that nobody waits for."""
        model = self.awaited.pop(message.incarnation, None)
        if model is None:
            return False
        self.freed.append((model, message))
        self._tell()
        return True

    def lose(self, incarnation: str) -> None:
        """That worker is gone."""
        model = self.awaited.pop(incarnation, None)
        if model is not None:
            self.died = model
            self._tell()

    def _tell(self) -> None:
        if self.over:
            self.on_over()


class Clearings:
    """The orders under way, by id."""

    def __init__(self) -> None:
        self._open: dict[str, Clearing] = {}

    @contextmanager
    def open(self, id: str, awaited: Mapping[str, str]) -> Iterator[Clearing]:
        """One more, for as long as the context is open."""
        self._open[id] = Clearing(id, dict(awaited))
        try:
            yield self._open[id]
        finally:
            del self._open[id]

    def answer(self, message: CacheCleared) -> bool:
        """False for an answer that nobody waits for."""
        clearing = self._open.get(message.id)
        return clearing is not None and clearing.answer(message)

    def lose(self, incarnation: str) -> None:
        """A worker is gone, for all of them."""
        for clearing in self._open.values():
            clearing.lose(incarnation)
