"""Whether the machine may fall asleep: not while requests run, nor shortly after. Pure, the clock handed
in."""

from __future__ import annotations

HOLD_S = 60.0
"""So long it is kept awake for whoever thinks of the next question."""


class Wakefulness:
    """Asked now and then."""

    def __init__(self) -> None:
        self._busy_at: float | None = None

    def is_wanted(self, busy: bool, now: float) -> bool:
        """`busy`: whether there are requests."""
        if busy:
            self._busy_at = now
        return self._busy_at is not None and now - self._busy_at < HOLD_S
