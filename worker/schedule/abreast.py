"""Prompts side by side: how wide a call is that gives several rows a piece of theirs. Pure.

Layers with a state go from token to token, for all rows at once: narrow pieces of many prompts cost less than
wide ones of a few. But who runs side by side also ends together, and one after another half of them end
earlier. So it is done only where nobody waits longer for it on average.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from worker.schedule.pace import CHUNK_TOKENS_MIN, Budget, Work
from worker.schedule.rows import Row

ROWS_MAX = 16
TOKENS_MAX = 2048
"""A prompt longer than this runs by itself: its caches are copied before and behind each such call."""


class Span(NamedTuple):
    """A call: so many `rows`, each with a piece of so many tokens."""

    rows: int
    width: int


def may_run(row: Row) -> bool:
    """Whether pieces of it may be run in one call with others'."""
    return row.is_scored and not row.pictures and not row.sparse and len(row.tokens) <= TOKENS_MAX


def room_of(row: Row) -> int:
    """How many tokens it can be run further: all that are left, or to where it is to be stored."""
    ends = [cut - row.prefilled for cut in row.cuts if cut > row.prefilled]
    return min([row.left, *ends[:1]])


def span_of(apart: Span, rooms: Sequence[int], begin: int, budget: Budget) -> Span | None:
    """The call in place of one that is `apart`, where there is a better one.

    `rooms`: of all rows that stand at `begin`, see `room_of`, the first in line first.
    """
    best, rate = None, 0.0
    for span in _narrower(apart, rooms, begin, budget):
        seconds = budget.pace.seconds(Work.call(*span, begin))
        if seconds and span.rows * span.width / seconds > rate:
            best, rate = span, span.rows * span.width / seconds
    if budget.pace.is_curious and apart.rows == 1:
        return best or _least(apart, rooms, budget)
    if best is None:
        return None
    alone = budget.pace.seconds(Work.call(*apart, begin))
    times = best.rows / apart.rows
    return best if rate * alone * (times + 1) > 2 * times * apart.rows * apart.width else None


def _least(apart: Span, rooms: Sequence[int], budget: Budget) -> Span | None:
    """To try what several rows take where there is no time for more than the least."""
    least = Span(2, CHUNK_TOKENS_MIN)
    able = sum(room >= least.width for room in rooms) >= least.rows and rooms[0] >= least.width
    is_near = apart.width < least.rows * least.width <= budget.tokens_max
    return least if able and is_near else None


def _narrower(apart: Span, rooms: Sequence[int], begin: int, budget: Budget) -> list[Span]:
    """For each width below that of `apart` the most rows, where these are more."""
    found = []
    for width in (size for size in budget.pace.sizes if size < min(apart.width, rooms[0])):
        able = min(ROWS_MAX, sum(room >= width for room in rooms))
        counts = range(1, able + 1)
        over = bisect.bisect(counts, False, key=lambda rows: not budget.holds(Work.call(rows, width, begin)))
        if over > apart.rows:
            found.append(Span(over, width))
    return found
