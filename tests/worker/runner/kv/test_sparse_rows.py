"""Which columns exist and are attended to, checked by counting them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.runner.kv.buckets import Bucket
from worker.runner.kv.positions import BatchPositions
from worker.runner.kv.sparse_rows import Gaps

LENGTH = 60


def gaps() -> st.SearchStrategy[Gaps]:
    """Draw up to four gaps, apart or adjacent."""

    def cut(places: list[int]) -> Gaps:
        ordered = sorted(places)
        pairs = zip(ordered[::2], ordered[1::2], strict=True)
        return Gaps(tuple(pair for pair in pairs if pair[0] < pair[1]))

    even = st.lists(st.integers(0, LENGTH), min_size=8, max_size=8)
    return even.map(cut)


def there(gaps: Gaps) -> list[int]:
    """Return the positions that have columns."""
    return [at for at in range(LENGTH) if not any(first <= at < last for first, last in gaps.spans)]


@given(gaps(), st.integers(-9, LENGTH), st.integers(0, LENGTH))
def test_columns_are_counted_between_positions(gaps: Gaps, first: int, count: int) -> None:
    last = min(max(first, 0) + count, LENGTH)
    assert gaps.columns(first, last) == sum(first <= at < last for at in there(gaps))


@given(gaps(), st.data())
def test_the_last_columns_stand_where_nothing_was_left_out(gaps: Gaps, data: st.DataObject) -> None:
    columns = there(gaps)
    count = data.draw(st.integers(0, len(columns)))
    found = [at for first, last in gaps.runs(count, LENGTH) for at in range(first, last)]
    assert found == columns[len(columns) - count :]
    assert len(columns) + gaps.total == LENGTH


@given(st.lists(gaps(), min_size=1, max_size=4), st.integers(1, LENGTH + 9))
def test_a_window_holds_what_stands_within_it(rows: list[Gaps], window: int) -> None:
    positions = BatchPositions()
    bucket = Bucket(2 * LENGTH, list(range(len(rows))), len(rows))
    positions.arrange([len(there(each)) for each in rows], rows, [bucket])
    positions.begin(1)
    mask = positions.mask(window, None)
    for row, each in enumerate(rows):
        visible = sum(at > LENGTH - window for at in there(each)) + 1
        columns = len(there(each)) + 1
        seen = [True] * columns if mask is None else mask[row, 0, 0].tolist()
        assert seen[columns - visible : columns] == [True] * visible
        assert sum(seen) == visible
    offset = positions.offset(behind=False)
    assert (offset if len(rows) == 1 else offset.tolist()) == (
        LENGTH if len(rows) == 1 else [LENGTH] * len(rows)
    )
