"""How long each part of a start took."""

from __future__ import annotations

import time
from collections.abc import Callable


class Laps:
    """One part after another: the time between two calls of `lap` is one's own. For one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self.seconds: dict[str, float] = {}
        """By the names of the parts, in the order in which these were ended first."""

    def lap(self, name: str) -> None:
        """What has been going on since the last call, or the beginning, is over."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def rounded(self) -> dict[str, float]:
        """To milliseconds."""
        return {name: round(seconds, 3) for name, seconds in self.seconds.items()}

    @property
    def total_s(self) -> float:
        """Of all parts that are over."""
        return self._last - self._began

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
