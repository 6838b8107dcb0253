"""How soon, and whether at all, what died is started again. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """How soon, and how often at all, what died is started again. `stable_s`: so long a good life is."""

    delay_s: float = 0.2
    delay_s_max: float = 10.0
    stable_s: float = 5.0
    deaths_max: int = 10
    window_s: float = 300.0


class RestartPolicy:
    """When a child that died is started again: at once after a good life, and later each time that it dies
    without one; not at all when deaths come too fast.

    The delay is each child's own. Deaths are counted over all children: a system that keeps losing processes
    is broken as a whole, whichever of them dies.
    """

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._delays: dict[str, float] = {}
        self._deaths: deque[float] = deque(maxlen=limits.deaths_max + 1)

    def died(self, name: str, lived_s: float, now: float) -> float | None:
        """The seconds until its restart, or None: more than `deaths_max` deaths within `window_s`.

        `lived_s`: how long it was of use; 0.0 for one that died before it could serve.
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
