"""Prefill batches of a step: which prompts run, how much of each, which in one call. Pure: changes no row.

Rows of one family have the same prompt: one of them runs it, and the others become copies. Short prompts run
together while little of the call is padding, and so do the short ends of prompts whose stored prefixes have
one length. So do chunks of prompts at the same position, if that is better (lock-step prefill). Prompts with
images run alone, up to their next image that is not cached. While a long prompt is first, admitted short ones
go before it in every other step.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from worker.prefixes.matching import Match
from worker.schedule.encoder_cache import EncoderCacheManager
from worker.schedule.prefill_cost import CHUNK_TOKENS_MIN, PrefillBudget, PrefillWork
from worker.schedule.prefix_sharing import SHORT_TOKENS_MAX
from worker.schedule.rows import Chunk, Group, Row, work_of

PADDING_MAX = 0.25
"""Maximum share of padding in a call with several rows."""

LOCKSTEP_ROWS_MAX = 16
LOCKSTEP_TOKENS_MAX = 2048
"""Prompts longer than this run alone: a row's caches are copied before and after each lock-step call."""


class CallShape(NamedTuple):
    """Shape of a lock-step call: `rows` rows with a chunk of `width` tokens each.

    Recurrent layers go token by token, for all rows at once: narrow chunks of many prompts cost less than
    wide ones of a few. But rows in lock step also finish together, where one after another half of them
    finish earlier. So it is done only if the mean time to the first token does not grow.
    """

    rows: int
    width: int


def may_run_in_lockstep(row: Row) -> bool:
    """Return whether chunks of the row may be run in one call with those of others."""
    is_plain = row.is_scored and not row.images and not row.sparse
    return is_plain and len(row.tokens) <= LOCKSTEP_TOKENS_MAX


def room_of(row: Row) -> int:
    """Return the number of tokens that the row can be run: to its end, or to where a chunk must end."""
    return min([row.left, *(cut - row.prefilled for cut in row.cuts_behind(row.prefilled))])


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
        able = min(LOCKSTEP_ROWS_MAX, sum(room >= width for room in rooms))
        counts = range(1, able + 1)
        over = bisect.bisect(
            counts, False, key=lambda rows: not budget.holds(PrefillWork.call(rows, width, begin))
        )
        if over > apart.rows:
            found.append(CallShape(over, width))
    return found


def leads_of(line: Iterable[Row]) -> dict[int, Row]:
    """Return, by family, the row that runs the prompt for all of it: the first of those furthest along."""
    leads: dict[int, Row] = {}
    for row in line:
        lead = leads.setdefault(row.prompt_group, row)
        if row.prefilled > lead.prefilled:
            leads[row.prompt_group] = row
    return leads


def overtaking(heads: Mapping[Row, Match | None], placed: Container[Row]) -> list[Row]:
    """Return the admitted short prompts that may go before the first of `heads`, if that one is long.

    They have its priority. What is restored of a prompt does not count.
    """
    first = next(iter(heads), None)
    if first is None or not _is_long(first, heads[first]):
        return []
    return [
        row
        for row, match in heads.items()
        if row in placed
        and row.request.priority == first.request.priority
        and not row.images
        and not _is_long(row, match)
    ]


def _is_long(row: Row, match: Match | None) -> bool:
    return len(row.tokens) - 1 - begin_of(row, match) > SHORT_TOKENS_MAX


def form_groups(
    line: Sequence[Row],
    heads: Mapping[Row, Match | None],
    budget: PrefillBudget,
    encoder_cache: EncoderCacheManager,
) -> list[Group]:
    """Form the groups of one plan, within the budget.

    `heads`: the rows to run, in order, each with the stored prefix it begins with: leads of `line`, followed
    by rows that are not admitted yet and can only run along with one that is.
    """
    placed, waiting = set(line), dict(heads)
    groups: list[Group] = []
    while waiting:
        head = next(iter(waiting))
        if head not in placed:
            break
        match = waiting.pop(head)
        begin = begin_of(head, match)
        left, open_ = len(head.tokens) - 1 - begin, encoder_cache.reach(head, begin) - begin
        if left and not open_:
            continue  # waits for an image to be encoded
        size = min(
            [
                budget.chunk_length(open_, begin),
                *(cut - begin for cut in head.cuts_behind(begin)),
            ]
        )
        if left and not size:
            break
        joining = _joining(head, match, waiting, placed, budget) if is_short(head, match) else []
        apart = CallShape(1 + len(joining), max([size, *(_rest_of(row, waiting[row]) for row in joining)]))
        if match is None and (beside := _shared_chunk(head, apart, placed, waiting, budget)):
            rows, width = beside
            group = [_chunk(row, None, width, line) for row in rows]
        else:
            whole = (_whole(row, waiting[row], placed, line) for row in joining)
            group = [_chunk(head, match, size, line), *whole]
        for chunk in group[1:]:
            del waiting[chunk.row]
        budget.spend(work_of(group))
        groups.append(group)
    return groups


def is_short(row: Row, match: Match | None) -> bool:
    """Return whether all of the prompt behind its stored prefix may be run in one call with others."""
    begin = begin_of(row, match)
    is_plain = not row.prefilled and not row.cuts_behind(begin) and not row.images and not row.sparse
    return is_plain and 0 < _rest_of(row, match) <= SHORT_TOKENS_MAX


def _rest_of(row: Row, match: Match | None) -> int:
    """Return the number of tokens to run of a prompt behind its stored prefix. Nothing of it was skipped."""
    return len(row.tokens) - 1 - begin_of(row, match)


def begin_of(row: Row, match: Match | None) -> int:
    """Return the position from which a row is run, after the stored prefix it begins with."""
    return match.length if match else row.prefilled


def _chunk(row: Row, match: Match | None, size: int, line: Sequence[Row]) -> Chunk:
    begin = begin_of(row, match)
    last = begin + size == len(row.tokens) - 1
    copies = tuple(
        other for other in line if last and other.prompt_group == row.prompt_group and other is not row
    )
    return Chunk(row, row.tokens[begin : begin + size], last, copies, match)


def _whole(row: Row, match: Match | None, placed: Container[Row], line: Sequence[Row]) -> Chunk:
    """Return what is left of a prompt as one chunk. A row that is not admitted does not start after it."""
    if row in placed:
        return _chunk(row, match, _rest_of(row, match), line)
    return Chunk(row, row.tokens[begin_of(row, match) : -1], last=False, match=match)


def _joining(
    head: Row,
    match: Match | None,
    others: Mapping[Row, Match | None],
    placed: Container[Row],
    budget: PrefillBudget,
) -> list[Row]:
    """Return short prompts to run in one call with `head`: at its position and near enough in length, first
    those of highest priority and most alike. None if `head` is cut."""
    found: list[Row] = []
    begin, real = begin_of(head, match), _rest_of(head, match)
    width = real
    able = {
        row: _rest_of(row, stored)
        for row, stored in others.items()
        if is_short(row, stored) and begin_of(row, stored) == begin
    }
    unlike = {row: abs(rest - real) if row in placed else 0 for row, rest in able.items()}
    for row in sorted(able, key=lambda row: (row not in placed, row.queue_key[0], unlike[row])):
        rest = able[row]
        widest, rows = max(width, rest), 2 + len(found)
        padding = 1 - (real + rest) / (widest * rows)
        if padding < PADDING_MAX and budget.holds(PrefillWork.call(rows, widest, begin)):
            found.append(row)
            real, width = real + rest, widest
    return found


def _shared_chunk(
    head: Row,
    apart: CallShape,
    placed: Container[Row],
    others: Mapping[Row, Match | None],
    budget: PrefillBudget,
) -> tuple[list[Row], int] | None:
    """Return the rows and the width of a lock-step call with `head`, if it is better than `apart`."""
    if budget.spent.calls or not may_run_in_lockstep(head):
        return None
    rows = [head]
    for row, match in others.items():
        stands = row in placed and (row.prefilled, row.queue_key[0]) == (head.prefilled, head.queue_key[0])
        if stands and match is None and may_run_in_lockstep(row):
            rows.append(row)
    span = span_of(apart, [room_of(row) for row in rows], head.prefilled, budget)
    if span is None:
        return None
    return [row for row in rows if room_of(row) >= span.width][: span.rows], span.width
