"""Buckets of random rows that come, grow and leave: each row has a slot with room, and is seldom copied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.runner.kv.buckets import COLUMNS_STEP, FED_MAX, Bucket, arrange, capacity, refill

LENGTHS = st.one_of(st.integers(0, 600), st.integers(0, 40_000))
CHANGES = st.lists(st.tuples(st.lists(LENGTHS, max_size=5), st.randoms(use_true_random=False)), max_size=12)


@given(st.integers(0, 1_000_000))
def test_a_slot_has_room_for_a_step_and_is_at_most_an_eighth_empty(tokens: int) -> None:
    columns = capacity(tokens)
    assert columns >= tokens + FED_MAX
    assert columns - tokens - FED_MAX < max(COLUMNS_STEP, columns / 8)
    assert capacity(columns - FED_MAX) == columns


@given(st.integers(0, 20), st.data(), st.integers(0, 8))
def test_as_few_rows_move_as_possible(rows: int, data: st.DataObject, joining: int) -> None:
    leaving = data.draw(st.lists(st.sampled_from(range(rows)), unique=True) if rows else st.just([]))
    order = arrange(rows, leaving, joining)
    assert sorted(order) == sorted({*range(rows)} - {*leaving} | {*range(rows, rows + joining)})
    moved = sum(place != row < rows for place, row in enumerate(order))
    assert moved <= max(0, len(leaving) - joining)


@given(CHANGES, st.booleans())
def test_every_row_has_one_slot_that_its_tokens_were_copied_to(changes: list, is_single: bool) -> None:
    rows: list[str] = []
    lengths: dict[str, int] = {}
    buckets: list[Bucket] = []
    held: dict[Bucket, list[str | None]] = {}
    for number, (coming, random) in enumerate(changes):
        leaving = [place for place in range(len(rows)) if random.random() < 0.3]
        new = [f"{number}.{index}" for index in range(len(coming))]
        order = arrange(len(rows), leaving, len(new))
        lengths |= dict(zip(new, coming, strict=True))
        everybody = [*rows, *new]
        old_count, rows = len(rows), [everybody[row] for row in order]
        for row in rows:
            lengths[row] += random.choice([0, 1, 300])
        refills = refill(
            buckets, order, [capacity(lengths[row]) for row in rows], old_count, is_single=is_single
        )
        after: dict[Bucket, list[str | None]] = {}
        for each in refills:
            slots = list(held[each.old]) if each.old else [None] * each.bucket.slots
            for slot, source in each.sources.items():
                slots[slot] = new[source.slot] if source.bucket is None else held[source.bucket][source.slot]
            after[each.bucket] = slots
        buckets, held = [each.bucket for each in refills], after
        for bucket in buckets:
            names = [rows[place] for place in bucket.rows]
            assert held[bucket][: len(names)] == names
            assert len(names) <= bucket.slots <= max(len(names) * 4 // 3, 1) + 1
            assert bucket.columns >= max(lengths[name] for name in names) + FED_MAX
            assert is_single or {capacity(lengths[name]) for name in names} == {bucket.columns}
        assert sorted(place for bucket in buckets for place in bucket.rows) == list(range(len(rows)))
        assert len(buckets) <= 1 or not is_single
        if is_single and rows:
            assert buckets[0].rows == list(range(len(rows)))


def test_a_bucket_is_seldom_copied_when_rows_come_and_leave_one_after_another() -> None:
    buckets: list[Bucket] = []
    copied = 0
    counts = [*range(1, 49), *range(47, 0, -1)]
    before = 0
    for count in counts:
        order = list(range(count)) if count < before else [*range(before), before]
        [each] = refill(buckets, order, [512] * count, before, is_single=False)
        copied += sum(source.bucket is not None for source in each.sources.values())
        buckets, before = [each.bucket], count
    assert copied < 4 * len(counts)
