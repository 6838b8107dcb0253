"""What the supervisor's core decides about plans: when a child is run in another way. Pure.

A child may have further plans, on fewer machines or with a smaller model. It falls to the next one when the
one before has been down for too long: from the first death after it had loaded, or without having loaded at
all, until it has loaded again. A plan that takes over is down from that moment. There is no way back but a
reload, which begins with the first plan again: whether its machines are there, only a person knows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from deploy.supervisor.children import Entry, State
from deploy.supervisor.events import Decision, Fall, Kill, Report

_LOOK_S = 1.0
"""One that is just being told to end is looked at again so late."""


class Falls:
    """Of all children. `after_s`: of those with further plans, how long each may be down. `plans`: how many
    there are behind the first; none named: one."""

    def __init__(self, after_s: Mapping[str, float], plans: Mapping[str, int] | None = None) -> None:
        self._after_s = dict(after_s)
        self._plans = dict.fromkeys(after_s, 1) | dict(plans or {})
        self._left = dict(self._plans)
        self._due: dict[str, float] = {}
        self._falling: set[str] = set()

    def wake_at(self) -> list[float]:
        """When time alone changes something."""
        return list(self._due.values())

    def may_fall(self, child: str) -> bool:
        """It has a plan left."""
        return self._left.get(child, 0) > 0

    def died(self, child: str, now: float) -> None:
        """A process of it has ended that was not told to."""
        if self.may_fall(child):
            self._due.setdefault(child, now + self._after_s[child])

    def loaded(self, child: str) -> None:
        """It is of use again."""
        self._due.pop(child, None)

    def is_due(self, child: str, now: float) -> bool:
        return now >= self._due.get(child, now + 1)

    def follow(self, entries: Iterable[Entry], now: float) -> list[Decision]:
        """Who has been down for too long is run by its next plan."""
        decisions: list[Decision] = []
        for entry in entries:
            if not self.is_due(entry.child, now):
                continue
            if entry.state in (State.WAITING, State.RUNNING):
                decisions += self.fall(entry, "it does not come back", now, is_there=True)
            elif entry.state in (State.ENDING, State.KILLED):
                self._due[entry.child] = now + _LOOK_S
            else:  # nobody wants it
                self._due.pop(entry.child)
        return decisions

    def fall(self, entry: Entry, why: str, now: float, *, is_there: bool = False) -> list[Decision]:
        """It has one plan less from now on. `is_there`: its process has not just ended."""
        child = entry.child
        self._left[child] -= 1
        self._due.pop(child, None)
        self.died(child, now)
        number, last = 1 + self._plans[child] - self._left[child], 1 + self._plans[child]
        told = Report(f"{entry.name}: {why}; plan {number} of {last} takes over", logging.ERROR)
        if is_there and entry.state is State.RUNNING:
            self._falling.add(child)
            return [told, Fall(child), Kill(entry.name)]  # and starts anew when it is gone
        entry.state, entry.due = State.WAITING, now
        return [told, Fall(child)]

    def has_landed(self, entry: Entry, now: float) -> bool:
        """Whether one that has ended was killed for that; then it starts anew at once."""
        if entry.child not in self._falling:
            return False
        self._falling.discard(entry.child)
        entry.state, entry.due = State.WAITING, now
        return True

    def begin_anew(self, child: str, plans: int) -> None:
        """Somebody has had it started by a plan behind which there are so many."""
        self._due.pop(child, None)
        if child in self._plans:
            self._plans[child] = self._left[child] = plans
