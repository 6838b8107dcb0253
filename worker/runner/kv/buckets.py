"""Buckets: rows of one capacity share a buffer, so rows of unequal lengths decode together without padding.

A row has a *slot* in the bucket whose buffers are as wide as it needs. It changes the bucket when it outgrows
it, and only then is it copied. A slot that becomes free is taken by a joining row, or by the bucket's last
row. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Order = Sequence[int]
"""The row for each place: the index of an old row, or from the number of old rows on that of a joining
one."""

FED_MAX = 16
"""Maximum number of tokens of a row in one step; a slot always has room for them."""
COLUMNS_STEP = 256
"""Number of columns by which capacities grow, as upstream's buffers do. Beyond 16 steps they grow by more,
such that at most an eighth of a slot is empty."""
SIMILAR_TOKENS = 512
"""Rows up to this length are similar: padding them costs less than a forward pass of their own."""
SPARE_SHARE = 4
"""A bucket that needs more slots gets one more for every four of its rows, so that it is seldom copied. It is
copied into a smaller one when more than one slot, or one for every three of its rows, is empty."""


def capacity(tokens: int) -> int:
    """Return the columns of a slot for a row of `tokens` tokens and those of a step."""
    needed, step = tokens + FED_MAX, COLUMNS_STEP
    while needed > 16 * step:
        step *= 2
    return -(-needed // step) * step


def are_similar(lengths: Sequence[int]) -> bool:
    """Return whether rows of these lengths may share one bucket, where each bucket needs a forward pass."""
    return max(lengths) <= max(2 * min(lengths), SIMILAR_TOKENS)


@dataclass(eq=False, slots=True)
class Bucket:
    """Rows whose slots have one capacity, in the order of their slots."""

    columns: int
    rows: list[int] = field(default_factory=list)
    """The place in the batch of the row in each slot."""
    slots: int = 0
    """Number of slots of the buffers, which may be more than there are rows."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tokens of a slot come from: a slot of an old bucket, or the joining row of this number."""

    bucket: Bucket | None
    slot: int


@dataclass(frozen=True, slots=True)
class Refill:
    """What becomes of a bucket: `sources` of the slots that change. `old`: the bucket whose buffers it keeps;
    None: it gets new ones, and all its slots have a source."""

    bucket: Bucket
    sources: dict[int, Source]
    old: Bucket | None


def refill(
    old: Sequence[Bucket], order: Order, columns: Sequence[int], joining_from: int, *, is_single: bool
) -> list[Refill]:
    """Return the buckets of a batch whose rows change.

    `order`: as `Order`. `columns`: the capacity that the row in each place needs. `joining_from`: number of
    old rows. `is_single`: all rows share one bucket, as wide as the longest needs, with slots in the order of
    the batch.
    """
    seats = {bucket.rows[slot]: Source(bucket, slot) for bucket in old for slot in range(len(bucket.rows))}
    sources = [seats[row] if row < joining_from else Source(None, row - joining_from) for row in order]
    if is_single:
        wanted = {max(columns): list(range(len(order)))} if columns else {}
    else:
        wanted = {}
        for place, needed in enumerate(columns):
            wanted.setdefault(needed, []).append(place)
    known = {bucket.columns: bucket for bucket in old}
    return [
        _refilled(known.get(needed), needed, wanted[needed], sources, keeps_order=is_single)
        for needed in sorted(wanted)
    ]


def _refilled(
    old: Bucket | None, columns: int, places: list[int], sources: Sequence[Source], *, keeps_order: bool
) -> Refill:
    slots = places if keeps_order or old is None else _seated(old, places, sources)
    count, has = len(slots), old.slots if old else 0
    if old is not None and 0 <= has - count <= max(count // 3, count > 1):
        bucket = Bucket(columns, slots, has)
        moved = {
            slot: sources[place] for slot, place in enumerate(slots) if sources[place] != Source(old, slot)
        }
        return Refill(bucket, moved, old)
    spare = count // SPARE_SHARE if count > has > 0 else 0
    bucket = Bucket(columns, slots, count + spare)
    return Refill(bucket, {slot: sources[place] for slot, place in enumerate(slots)}, None)


def _seated(old: Bucket, places: list[int], sources: Sequence[Source]) -> list[int]:
    """Return the place of the row in each slot: rows that stay keep their slots as far as possible."""
    staying = {sources[place].slot: place for place in places if sources[place].bucket is old}
    coming = [place for place in places if sources[place].bucket is not old]
    slots: list[int] = []
    for slot in range(len(places)):
        if slot in staying:
            slots.append(staying.pop(slot))
        elif coming:
            slots.append(coming.pop(0))
        else:  # the last row moves into the hole
            slots.append(staying.pop(max(staying)))
    return slots


def arrange(rows: int, leaving: Sequence[int], joining: int) -> list[int]:
    """Return the row for each place when `leaving` rows leave and `joining` ones come, moving as few as
    possible.

    Joining rows take the free places first, then new ones at the end. Places still free are filled by the
    last rows. Joining rows are numbered from `rows` on.
    """
    order = list(range(rows))
    coming = list(range(rows, rows + joining))
    free = sorted(leaving)
    while free and coming:
        order[free.pop(0)] = coming.pop(0)
    order += coming
    gone = set(free)
    for place in free:
        while order and order[-1] in gone:
            order.pop()
        if place < len(order):
            order[place] = order.pop()
    return order
