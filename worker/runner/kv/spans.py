"""Gaps: the tokens that sparse prefill skipped in a row, and which so have no columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

Span = tuple[int, int]
"""From a position to before another."""


@dataclass(frozen=True)
class Gaps:
    """`spans`: the skipped spans of a row, in order; all lie before the row's next token."""

    spans: tuple[Span, ...] = ()

    @cached_property
    def total(self) -> int:
        """Number of skipped tokens."""
        return sum(last - first for first, last in self.spans)

    def and_also(self, first: int, last: int) -> Gaps:
        """Return the gaps extended by a span behind them."""
        return Gaps((*self.spans, (first, last)))

    def columns(self, first: int, last: int) -> int:
        """Count the positions from `first` to before `last` that have a column."""
        first = max(first, 0)
        found = last - first
        for begin, end in reversed(self.spans):
            if end <= first:
                break
            found -= max(0, min(end, last) - max(begin, first))
        return found

    def runs(self, count: int, last: int) -> list[Span]:
        """Return the positions of the `count` columns before position `last`, in order."""
        return sorted(run for run in self._back(count, last) if run[0] < run[1])

    def _back(self, count: int, last: int) -> Iterator[Span]:
        for begin, end in reversed(self.spans):
            taken = min(count, last - end)
            yield last - taken, last
            count, last = count - taken, begin
            if not count:
                return
        yield last - count, last


NO_GAPS = Gaps()
