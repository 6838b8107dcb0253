"""Timer of the phases of a worker's start."""

from __future__ import annotations

import time
from collections.abc import Callable


class StartupTimer:
    """Timer of consecutive phases, each ended by a call of `lap`. For one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self.seconds: dict[str, float] = {}
        """Seconds by phase, in the order in which phases first ended."""

    def lap(self, name: str) -> None:
        """End the phase that began with the last call or the start; repeated names add up."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def rounded(self) -> dict[str, float]:
        """Return the seconds of each phase, rounded to milliseconds."""
        return {name: round(seconds, 3) for name, seconds in self.seconds.items()}

    @property
    def total_s(self) -> float:
        """Seconds of all ended phases."""
        return self._last - self._began

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
