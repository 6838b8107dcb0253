"""Prefill batches of a step: which prompts run, how much of each, which in one call. Pure: changes no row.

Rows of one family have the same prompt: one of them runs it, and the others become copies. Short prompts run
together while little of the call is padding. So do chunks of prompts at the same position, if that is better
(`lockstep_prefill`). Prompts with images run alone, up to their next image that is not cached.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from worker.prefixes.index import Match
from worker.schedule import lockstep_prefill
from worker.schedule.encoder_cache import EncoderCacheManager
from worker.schedule.lockstep_prefill import CallShape
from worker.schedule.prefill_cost import PrefillBudget, PrefillWork
from worker.schedule.prefix_sharing import SHORT_TOKENS_MAX
from worker.schedule.rows import Chunk, Group, Row, work_of

PADDING_MAX = 0.25
"""Maximum share of padding in a call with several rows."""


def leads_of(line: Iterable[Row]) -> dict[int, Row]:
    """Return, by family, the row that runs the prompt for all of it: the first of those furthest along."""
    leads: dict[int, Row] = {}
    for row in line:
        lead = leads.setdefault(row.prompt_group, row)
        if row.prefilled > lead.prefilled:
            leads[row.prompt_group] = row
    return leads


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
                *(cut - begin for cut in head.snapshot_positions if cut > begin),
            ]
        )
        if left and not size:
            break
        joining = _joining(head, waiting, budget) if is_short(head, match) else []
        apart = CallShape(1 + len(joining), max([size, *(row.left for row in joining)]))
        if match is None and (beside := _shared_chunk(head, apart, placed, waiting, budget)):
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
    """Return whether the whole prompt may be run in one call with others."""
    fresh = (
        match is None
        and not row.snapshot_positions
        and not row.images
        and not row.sparse
        and row.prefilled == 0
    )
    return fresh and 0 < row.left <= SHORT_TOKENS_MAX


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


def _whole(row: Row) -> Chunk:
    """Return the whole prompt of a row that is not admitted yet as a chunk."""
    return Chunk(row, row.tokens[:-1], last=False)


def _joining(head: Row, others: Mapping[Row, Match | None], budget: PrefillBudget) -> list[Row]:
    """Return short prompts near enough in length to run in one call with `head`; none if `head` is cut."""
    found: list[Row] = []
    real, width = head.left, head.left
    for row, match in others.items():
        if not is_short(row, match):
            continue
        widest, rows = max(width, row.left), 2 + len(found)
        padding = 1 - (real + row.left) / (widest * rows)
        if padding < PADDING_MAX and budget.holds(PrefillWork.call(rows, widest, 0)):
            found.append(row)
            real, width = real + row.left, widest
    return found


def _shared_chunk(
    head: Row,
    apart: CallShape,
    placed: Container[Row],
    others: Mapping[Row, Match | None],
    budget: PrefillBudget,
) -> tuple[list[Row], int] | None:
    """Return the rows and the width of a lock-step call with `head`, if it is better than `apart`."""
    if budget.spent.calls or not lockstep_prefill.may_run(head):
        return None
    rows = [head]
    for row, match in others.items():
        stands = row in placed and (row.prefilled, row.queue_key[0]) == (head.prefilled, head.queue_key[0])
        if stands and match is None and lockstep_prefill.may_run(row):
            rows.append(row)
    span = lockstep_prefill.span_of(
        apart, [lockstep_prefill.room_of(row) for row in rows], head.prefilled, budget
    )
    if span is None:
        return None
    return [row for row in rows if lockstep_prefill.room_of(row) >= span.width][: span.rows], span.width
