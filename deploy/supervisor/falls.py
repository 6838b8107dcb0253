"""What the supervisor's core decides about plans: when a child is run in another way. Pure.

A child may have a second plan, on fewer machines or with a smaller model. It falls back to that when its
first one has been down for too long: from the first death after it had loaded, or without having loaded at
all, until it has loaded again. It falls once; whoever wants the first plan back starts everything anew.
"""

from __future__ import annotations

from collections.abc import Mapping


class Falls:
    """Of all children. `after_s`: of those with a second plan, how long the first may be down."""

    def __init__(self, after_s: Mapping[str, float]) -> None:
        self._after_s = dict(after_s)
        self._due: dict[str, float] = {}

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

    def fall(self, child: str) -> None:
        """It has no other plan from now on."""
        self._due.pop(child, None)
        self._after_s.pop(child, None)
