"""What the supervisor's core decides about plans: when a child is run in another way. Pure.

A child may have a second plan, on fewer machines or with a smaller model. It falls back to that when its
first one has been down for too long: from the first death after it had loaded, or without having loaded at
all, until it has loaded again. It falls once; whoever wants the first plan back starts everything anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from deploy.supervisor.children import Entry, State
from deploy.supervisor.events import Decision, Fall, Kill, Report


class Falls:
    """Of all children. `after_s`: of those with a second plan, how long the first may be down."""

    def __init__(self, after_s: Mapping[str, float]) -> None:
        self._after_s = dict(after_s)
        self._due: dict[str, float] = {}
        self._falling: set[str] = set()

    def wake_at(self) -> list[float]:
        """When time alone changes something."""
        return list(self._due.values())

    def may_fall(self, child: str) -> bool:
        """It has a plan left."""
        return child in self._after_s

    def died(self, child: str, now: float) -> None:
        """A process of it has ended that was not told to."""
        if child in self._after_s:
            self._due.setdefault(child, now + self._after_s[child])

    def loaded(self, child: str) -> None:
        """It is of use again."""
        self._due.pop(child, None)

    def is_due(self, child: str, now: float) -> bool:
        return now >= self._due.get(child, now + 1)

    def follow(self, entries: Iterable[Entry], now: float) -> list[Decision]:
        """Who has been down for too long is run by its second plan."""
        return [
            decision
            for entry in entries
            if self.is_due(entry.child, now) and entry.state in (State.WAITING, State.RUNNING)
            for decision in self.fall(entry, "it does not come back", now, is_there=True)
        ]

    def fall(self, entry: Entry, why: str, now: float, *, is_there: bool = False) -> list[Decision]:
        """It has no other plan from now on. `is_there`: its process has not just ended."""
        self._due.pop(entry.child, None)
        self._after_s.pop(entry.child, None)
        told = Report(f"{entry.name}: {why}; its second plan takes over", logging.ERROR)
        if is_there and entry.state is State.RUNNING:
            self._falling.add(entry.child)
            return [told, Fall(entry.child), Kill(entry.name)]  # and starts anew when it is gone
        entry.state, entry.due = State.WAITING, now
        return [told, Fall(entry.child)]

    def has_landed(self, entry: Entry, now: float) -> bool:
        """Whether one that has ended was killed for that; then it starts anew at once."""
        if entry.child not in self._falling:
            return False
        self._falling.discard(entry.child)
        entry.state, entry.due = State.WAITING, now
        return True
