"""Histogram with fixed bucket bounds. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts by bucket, with the `sum` and `count` of all observations."""

    __slots__ = ("_counts", "bounds", "count", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: inclusive upper bounds of the buckets, ascending; one more bucket holds the rest."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """Return the number of observations at or below each bound, and last the total."""
        return list(accumulate(self._counts))
