"""Which prompts a step runs, how much of each, and which of them in one call. Pure: rows stay as they are.

Rows of one family have the same prompt: one of them leads, the others become copies of it. Short prompts run
together, as long as little of the call is padding, and pieces of prompts that stand at one position, where
that is better (`abreast`). Prompts with images run by themselves, and as far as their next image that is not
kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from worker.prefixes.index import Match
from worker.schedule import abreast
from worker.schedule.abreast import Span
from worker.schedule.gallery import Gallery
from worker.schedule.pace import Budget, Work
from worker.schedule.rows import Chunk, Group, Row, work_of
from worker.schedule.sharing import SHORT_TOKENS_MAX

PADDING_MAX = 0.25
"""The most of a call with several rows that may be padding."""


def leads_of(line: Iterable[Row]) -> dict[int, Row]:
    """By family, the row that runs for all of it: the one that is further along than those before it."""
    leads: dict[int, Row] = {}
    for row in line:
        lead = leads.setdefault(row.family, row)
        if row.prefilled > lead.prefilled:
            leads[row.family] = row
    return leads


def form_groups(
    line: Sequence[Row], heads: Mapping[Row, Match | None], budget: Budget, gallery: Gallery
) -> list[Group]:
    """The groups of one plan, as far as the budget goes.

    `heads`: who is run, in order, each with the stored prefix it begins with: leads of `line`, and behind
    them rows that have no place yet and can only run along with one that has.
    """
    placed, waiting = set(line), dict(heads)
    groups: list[Group] = []
    while waiting:
        head = next(iter(waiting))
        if head not in placed:
            break
        match = waiting.pop(head)
        begin = begin_of(head, match)
        left, open_ = len(head.tokens) - 1 - begin, gallery.reach(head, begin) - begin
        if left and not open_:
            continue  # it waits for an image, and its turn to have that encoded
        size = min([budget.cut(open_, begin), *(cut - begin for cut in head.cuts if cut > begin)])
        if left and not size:
            break
        joining = _joining(head, waiting, budget) if is_short(head, match) else []
        apart = Span(1 + len(joining), max([size, *(row.left for row in joining)]))
        if match is None and (beside := _beside(head, apart, placed, waiting, budget)):
            rows, width = beside
            group = [_chunk(row, None, width, line) for row in rows]
        else:
            whole = (_chunk(row, None, row.left, line) if row in placed else _whole(row) for row in joining)
            group = [_chunk(head, match, size, line), *whole]
        for chunk in group[1:]:
            del waiting[chunk.row]
        budget.spend(work_of(group))
        groups.append(group)
    return groups


def is_short(row: Row, match: Match | None) -> bool:
    """Whether all of its prompt may be run in one call with others."""
    fresh = match is None and not row.cuts and not row.pictures and not row.sparse and row.prefilled == 0
    return fresh and 0 < row.left <= SHORT_TOKENS_MAX


def begin_of(row: Row, match: Match | None) -> int:
    """The position from which on a row is run, behind the stored prefix it begins with."""
    return match.length if match else row.prefilled


def _chunk(row: Row, match: Match | None, size: int, line: Sequence[Row]) -> Chunk:
    begin = begin_of(row, match)
    last = begin + size == len(row.tokens) - 1
    copies = tuple(other for other in line if last and other.family == row.family and other is not row)
    return Chunk(row, row.tokens[begin : begin + size], last, copies, match)


def _whole(row: Row) -> Chunk:
    """All of a prompt that has no place yet."""
    return Chunk(row, row.tokens[:-1], last=False)


def _joining(head: Row, others: Mapping[Row, Match | None], budget: Budget) -> list[Row]:
    """Short prompts near enough in length to run in one call with `head`. None, if that one is cut."""
    found: list[Row] = []
    real, width = head.left, head.left
    for row, match in others.items():
        if not is_short(row, match):
            continue
        widest, rows = max(width, row.left), 2 + len(found)
        padding = 1 - (real + row.left) / (widest * rows)
        if padding < PADDING_MAX and budget.holds(Work.call(rows, widest, 0)):
            found.append(row)
            real, width = real + row.left, widest
    return found


def _beside(
    head: Row, apart: Span, placed: Container[Row], others: Mapping[Row, Match | None], budget: Budget
) -> tuple[list[Row], int] | None:
    """Who gets a piece along with `head`, and how wide it is, where that is better than to run it `apart`."""
    if budget.spent.calls or not abreast.may_run(head):
        return None
    rows = [head]
    for row, match in others.items():
        stands = row in placed and (row.prefilled, row.order[0]) == (head.prefilled, head.order[0])
        if stands and match is None and abreast.may_run(row):
            rows.append(row)
    span = abreast.span_of(apart, [abreast.room_of(row) for row in rows], head.prefilled, budget)
    if span is None:
        return None
    return [row for row in rows if abreast.room_of(row) >= span.width][: span.rows], span.width
