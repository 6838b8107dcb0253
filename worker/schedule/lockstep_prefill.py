"""Lock-step prefill: how many rows get a chunk in one call, and how wide the chunks are. Pure.

Recurrent layers go token by token, for all rows at once: narrow chunks of many prompts cost less than wide
ones of a few. But rows in lock step also finish together, where one after another half of them finish
earlier. So it is done only if the mean time to the first token does not grow.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from worker.schedule.prefill_cost import CHUNK_TOKENS_MIN, PrefillBudget, PrefillWork
from worker.schedule.rows import Row

ROWS_MAX = 16
TOKENS_MAX = 2048
"""Prompts longer than this run alone: a row's caches are copied before and after each lock-step call."""


class CallShape(NamedTuple):
    """Shape of a call: `rows` rows with a chunk of `width` tokens each."""

    rows: int
    width: int


def may_run(row: Row) -> bool:
    """Return whether chunks of the row may be run in one call with those of others."""
    return row.is_scored and not row.images and not row.sparse and len(row.tokens) <= TOKENS_MAX


def room_of(row: Row) -> int:
    """Return the number of tokens that the row can be run: to its end, or to its next snapshot position."""
    ends = [cut - row.prefilled for cut in row.snapshot_positions if cut > row.prefilled]
    return min([row.left, *ends[:1]])


def span_of(apart: CallShape, rooms: Sequence[int], begin: int, budget: PrefillBudget) -> CallShape | None:
    """Return a lock-step call that is better than `apart`, the call without lock step; None if there is none.

    `rooms`: `room_of` each row at position `begin`, in queue order.
    """
    best, rate = None, 0.0
    for span in _narrower(apart, rooms, begin, budget):
        seconds = budget.pace.seconds(PrefillWork.call(*span, begin))
        if seconds and span.rows * span.width / seconds > rate:
            best, rate = span, span.rows * span.width / seconds
    if budget.pace.is_measurement_due and apart.rows == 1:
        return best or _least(apart, rooms, budget)
    if best is None:
        return None
    alone = budget.pace.seconds(PrefillWork.call(*apart, begin))
    times = best.rows / apart.rows
    return best if rate * alone * (times + 1) > 2 * times * apart.rows * apart.width else None


def _least(apart: CallShape, rooms: Sequence[int], budget: PrefillBudget) -> CallShape | None:
    """Return the smallest call of several rows, to measure it when there is no time for a larger one."""
    least = CallShape(2, CHUNK_TOKENS_MIN)
    able = sum(room >= least.width for room in rooms) >= least.rows and rooms[0] >= least.width
    is_caught_up = apart.width < least.rows * least.width <= budget.tokens_max
    return least if able and is_caught_up else None


def _narrower(apart: CallShape, rooms: Sequence[int], begin: int, budget: PrefillBudget) -> list[CallShape]:
    """Return, for each smaller width than that of `apart`, the call with most rows, if it has more rows."""
    found = []
    for width in (size for size in budget.pace.sizes if size < min(apart.width, rooms[0])):
        able = min(ROWS_MAX, sum(room >= width for room in rooms))
        counts = range(1, able + 1)
        over = bisect.bisect(
            counts, False, key=lambda rows: not budget.holds(PrefillWork.call(rows, width, begin))
        )
        if over > apart.rows:
            found.append(CallShape(over, width))
    return found
