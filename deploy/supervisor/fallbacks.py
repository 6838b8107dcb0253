"""Fallback plans of the supervisor's core: when a child is run in another way. Pure.

A child may have further plans, on fewer machines or with a smaller model. It switches to the next one when
the current one has been down for too long: from the first death after it had loaded, or without it ever
having loaded, until it has loaded again. A new plan counts as down from the switch on. Only a reload returns
to the first plan: only a person knows whether its machines are available again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from deploy.supervisor.children import ChildEntry, ChildState
from deploy.supervisor.events import Decision, Kill, Report, UseFallback

_LOOK_S = 1.0
"""Delay before a child that is just ending is checked again."""


class Fallbacks:
    """Fallback state of all children. `after_s`: how long each child with further plans may be down.
    `plans`: the number of plans behind the first; 1 if not given."""

    def __init__(self, after_s: Mapping[str, float], plans: Mapping[str, int] | None = None) -> None:
        self._after_s = dict(after_s)
        self._plans = dict.fromkeys(after_s, 1) | dict(plans or {})
        self._left = dict(self._plans)
        self._due: dict[str, float] = {}
        self._switching: set[str] = set()

    def wake_at(self) -> list[float]:
        """Return the times at which `follow` must be called without an event."""
        return list(self._due.values())

    def may_switch(self, child: str) -> bool:
        """Return whether `child` has a plan left."""
        return self._left.get(child, 0) > 0

    def died(self, child: str, now: float) -> None:
        """Record an unexpected exit of `child`."""
        if self.may_switch(child):
            self._due.setdefault(child, now + self._after_s[child])

    def loaded(self, child: str) -> None:
        """Record that `child` is ready again."""
        self._due.pop(child, None)

    def is_due(self, child: str, now: float) -> bool:
        return now >= self._due.get(child, now + 1)

    def follow(self, entries: Iterable[ChildEntry], now: float) -> list[Decision]:
        """Switch children that have been down for too long to their next plans."""
        decisions: list[Decision] = []
        for entry in entries:
            if not self.is_due(entry.child, now):
                continue
            if entry.state in (ChildState.WAITING, ChildState.RUNNING):
                decisions += self.switch(entry, "it has been down for too long", now, is_there=True)
            elif entry.state in (ChildState.ENDING, ChildState.KILLED):
                self._due[entry.child] = now + _LOOK_S
            else:  # no longer wanted
                self._due.pop(entry.child)
        return decisions

    def switch(self, entry: ChildEntry, why: str, now: float, *, is_there: bool = False) -> list[Decision]:
        """Switch to the next plan. `is_there`: its process has not just ended."""
        child = entry.child
        self._left[child] -= 1
        self._due.pop(child, None)
        self.died(child, now)
        number, last = 1 + self._plans[child] - self._left[child], 1 + self._plans[child]
        report = Report(f"{entry.name}: {why}; plan {number} of {last} takes over", logging.ERROR)
        if is_there and entry.state is ChildState.RUNNING:
            self._switching.add(child)
            return [report, UseFallback(child), Kill(entry.name)]  # restarted when it is gone
        entry.state, entry.due = ChildState.WAITING, now
        return [report, UseFallback(child)]

    def is_serving(self, entry: ChildEntry, now: float) -> bool:
        """Return whether an ended process was killed for a switch of plans; if so, restart it at once."""
        if entry.child not in self._switching:
            return False
        self._switching.discard(entry.child)
        entry.state, entry.due = ChildState.WAITING, now
        return True

    def reset(self, child: str, plans: int) -> None:
        """Reset `child` after a reload to a plan that has `plans` fallbacks."""
        self._due.pop(child, None)
        if child in self._plans:
            self._plans[child] = self._left[child] = plans
