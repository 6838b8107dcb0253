"""Prefill batches of a step: which prompts run, how much of each, which in one call. Pure: changes no row.

Rows of one family have the same prompt: one of them runs it, and the others become copies. Short prompts run
together while little of the call is padding, and so do the short ends of prompts whose stored prefixes have
one length. Longer prompts run one after another. Prompts with images run alone, up to their next image that
is not cached. While a long prompt is first, admitted short ones go before it in every other step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from worker.core.encoder_cache import EncoderCache
from worker.core.prefill_cost import PrefillBudget, PrefillCall
from worker.core.prefix.matching import Match
from worker.core.prefix.sharing import SHORT_TOKENS_MAX
from worker.core.rows import Chunk, Group, Row, call_of

PADDING_MAX = 0.25
"""Maximum share of padding in a call with several rows."""

Heads = Mapping[Row, Match | None]
"""Rows to run, in order, each with the stored prefix it begins with."""


def form_groups(
    line: Sequence[Row], heads: Heads, budget: PrefillBudget, encoder_cache: EncoderCache
) -> list[Group]:
    """Form the groups of one plan, within the budget.

    `heads`: leads of `line`, followed by rows that are not admitted yet and can only run along with one that
    is.
    """
    placed, waiting = set(line), dict(heads)
    groups: list[Group] = []
    while waiting and (head := next(iter(waiting))) in placed:
        match = waiting.pop(head)
        begin = begin_of(head, match)
        open_ = encoder_cache.reach(head, begin) - begin
        if not open_ and _rest_of(head, match):
            continue  # waits for an image to be encoded
        size = budget.chunk_length(open_, begin)
        if open_ and not size:
            break
        size = min([size, *(cut - begin for cut in head.cuts_behind(begin))])
        group = [_chunk(head, match, size, line)]
        for row in _joining(head, match, waiting, placed, budget) if is_short(head, match) else []:
            stored = waiting.pop(row)
            group.append(_chunk(row, stored, _rest_of(row, stored), line))
        budget.spent.append(call_of(group))
        groups.append(group)
    return groups


def leads_of(line: Iterable[Row]) -> dict[int, Row]:
    """Return, by family, the row that runs the prompt for all of it: the first of those furthest along."""
    leads: dict[int, Row] = {}
    for row in line:
        lead = leads.setdefault(row.prompt_group, row)
        if row.prefilled > lead.prefilled:
            leads[row.prompt_group] = row
    return leads


def overtaking(heads: Heads, placed: Container[Row]) -> list[Row]:
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


def is_short(row: Row, match: Match | None) -> bool:
    """Return whether all of the prompt behind its stored prefix may be run in one call with others."""
    begin = begin_of(row, match)
    is_plain = not row.prefilled and not row.cuts_behind(begin) and not row.images
    return is_plain and 0 < _rest_of(row, match) <= SHORT_TOKENS_MAX


def begin_of(row: Row, match: Match | None) -> int:
    """Return the position from which a row is run, after the stored prefix it begins with."""
    return match.length if match else row.prefilled


def _is_long(row: Row, match: Match | None) -> bool:
    return _rest_of(row, match) > SHORT_TOKENS_MAX


def _rest_of(row: Row, match: Match | None) -> int:
    """Return the number of tokens to run of a prompt behind its stored prefix. Nothing of it was skipped."""
    return len(row.tokens) - 1 - begin_of(row, match)


def _chunk(row: Row, match: Match | None, size: int, line: Sequence[Row]) -> Chunk:
    """Return the next chunk of a row. One outside `line` is not admitted, and does not start after it."""
    begin = begin_of(row, match)
    last = size == _rest_of(row, match) and row in line
    copies = (other for other in line if last and other.prompt_group == row.prompt_group and other is not row)
    return Chunk(row, row.tokens[begin : begin + size], last, tuple(copies), match)


def _joining(
    head: Row, match: Match | None, others: Heads, placed: Container[Row], budget: PrefillBudget
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
        if padding < PADDING_MAX and budget.holds(PrefillCall(rows * widest, begin)):
            found.append(row)
            real, width = real + rest, widest
    return found
