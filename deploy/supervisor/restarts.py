"""Restart policy: whether a child that died is restarted, and after what delay. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits of restarts. `stable_s`: the uptime after which a child is restarted without delay. More than
    `deaths_max` deaths within `window_s` end the restarts."""

    delay_s: float = 0.2
    delay_s_max: float = 10.0
    stable_s: float = 5.0
    deaths_max: int = 10
    window_s: float = 300.0


class RestartPolicy:
    """Restart policy with exponential backoff: at once after a stable life, later after each short one, and
    not at all when deaths are too frequent.

    Each child has its own delay. Deaths are counted over all children: a system that keeps losing processes
    is broken as a whole, whichever of them dies.
    """

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._delays: dict[str, float] = {}
        self._deaths: deque[float] = deque(maxlen=limits.deaths_max + 1)

    def died(self, name: str, lived_s: float, now: float) -> float | None:
        """Return the seconds until the restart, or None after more than `deaths_max` deaths in `window_s`.

        `lived_s`: for how long it was ready; 0.0 if it died before that.
        """
        self._deaths.append(now)
        if len(self._deaths) > self.limits.deaths_max and now - self._deaths[0] <= self.limits.window_s:
            return None
        if lived_s >= self.limits.stable_s:
            self._delays.pop(name, None)
            return 0.0
        before = self._delays.get(name)
        self._delays[name] = (
            self.limits.delay_s if before is None else min(self.limits.delay_s_max, 2 * before)
        )
        return self._delays[name]
