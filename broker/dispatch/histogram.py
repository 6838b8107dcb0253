"""How often something took how long: counts by bounds that were set beforehand. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """`sum` and `count` are of all that was observed."""

    __slots__ = ("_counts", "bounds", "count", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the most that each class but the last holds, ascending; the last holds the rest."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """For each bound, how many were no greater; last, how many there were."""
        return list(accumulate(self._counts))
