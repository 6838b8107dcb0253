"""Keep-awake policy: no sleep while requests run, nor shortly after. Pure; the clock is injected."""

from __future__ import annotations

HOLD_S = 60.0
"""Time for which the machine stays awake after the last request, for the user's next question."""


class KeepAwake:
    """Keep-awake policy, to be polled."""

    def __init__(self) -> None:
        self._busy_at: float | None = None

    def is_wanted(self, busy: bool, now: float) -> bool:
        """Return whether the machine should stay awake. `busy`: whether there are requests."""
        if busy:
            self._busy_at = now
        return self._busy_at is not None and now - self._busy_at < HOLD_S
