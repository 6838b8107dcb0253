"""What is left out of long prompts: which spans, of which requests, and how it is read for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RequestError
from protocol.parts import Sparse
from tests.worker.weighers import Weigher
from worker.contract import Draw, Prepared, Shape
from worker.prefixes.index import PrefixIndex
from worker.schedule.rows import Phase, Row
from worker.schedule.scheduler import Policy, Scheduler
from worker.schedule.sparse import CHUNK_TOKENS, HEAD_TOKENS, TAIL_TOKENS, Thinning, least

WISH = Sparse(keep=0.3, above=1000)


@dataclass
class Weighing(Weigher):
    """A weigher to which the tokens of a list matter, and which has to be asked so often."""

    matters: Sequence[int] = ()
    parts: int = 3

    def weigh(self, row: str, last: int) -> list[float] | None:
        self.parts -= 1
        if self.parts > 0:
            return None
        return [float(token in self.matters) for token in self.read_of[row]]


def request(tokens: int = 5000, **fields: object) -> Prepared:
    whole = Prepared("a", tuple(range(tokens)), Draw(), (), 100, frozenset(), sparse=WISH)
    return replace(whole, **fields)  # type: ignore[arg-type]


def ticking() -> itertools.count[float]:
    return itertools.count(0.0, 0.01)


def thinned(thinning: Thinning, asked: Prepared) -> Row:
    """The row of a request whose prompt has been weighed."""
    scheduler = Scheduler(Policy(rows_max=4))
    wish = thinning.wish(asked)
    assert wish is not None
    row = scheduler.add(asked, 0.0, sparse=True)
    thinning.hold(row, wish)
    clock = ticking()
    for _ in range(1000):
        if not len(thinning):
            return row
        assert row.held
        thinning.read(thinning.first, lambda: next(clock), 0.005)
    raise AssertionError("it is never read")


# --- which spans -------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=3000),
    st.floats(0.05, 1.0),
    st.integers(0, 500),
)
def test_spans_are_apart_in_order_and_as_much_as_need_not_be_kept(
    weights: list[float], keep: float, dense: int
) -> None:
    spans, count = least(weights, keep, dense), len(weights)
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(set(edges)), "no two of them touch"
    left_out = sum(last - first for first, last in spans)
    assert count - left_out >= keep * count
    if spans:
        assert spans[0][0] >= max(dense, HEAD_TOKENS)
        assert spans[-1][1] <= count - TAIL_TOKENS
        room = count - max(dense, HEAD_TOKENS) - TAIL_TOKENS
        assert left_out >= min(room, (1 - keep) * count) - 2 * CHUNK_TOKENS


def test_what_matters_most_is_run() -> None:
    weights = [0.0] * 4000
    weights[2000:2020] = [1.0] * 20
    weights[3000] = 0.5
    spans = least(weights, 0.2, 0)
    for place in (2000, 2019, 3000):
        assert not any(first <= place < last for first, last in spans)


def test_of_a_prompt_that_is_hardly_longer_than_its_ends_nothing_is_left_out() -> None:
    assert least([1.0] * (HEAD_TOKENS + TAIL_TOKENS + CHUNK_TOKENS - 1), 0.1, 0) == []


# --- whose -------------------------------------------------------------------------------------------


def test_a_request_that_says_nothing_gets_what_is_usual() -> None:
    asked = request(sparse=None)
    assert Thinning(Weighing(), is_able=True).wish(asked) is None
    usual = Thinning(Weighing(), WISH, is_able=True)
    assert usual.wish(asked) == WISH
    assert usual.wish(request(sparse=Sparse(keep=1.0))) is None
    assert usual.wish(request(tokens=1000, sparse=None)) is None
    assert usual.wish(request(sparse=None, echo=True, draw=Draw(logprobs=0))) is None
    assert Thinning(None, WISH, is_able=True).wish(asked) is None
    assert Thinning(Weighing(), WISH).wish(asked) is None


@pytest.mark.parametrize(
    ("thinning", "fields", "why"),
    [
        (Thinning(Weighing()), {}, "layers"),
        (Thinning(None, is_able=True), {}, "--draft-model"),
        (Thinning(Weighing(), is_able=True), {"echo": True, "draw": Draw(logprobs=0)}, "run whole"),
        (Thinning(Weighing()), {"left_out": ((64, 96),)}, "layers"),
    ],
)
def test_who_asks_for_what_cannot_be_is_told_why(
    thinning: Thinning, fields: dict[str, object], why: str
) -> None:
    with pytest.raises(RequestError) as caught:
        thinning.wish(request(**fields))
    assert caught.value.param == "sparse_prefill"
    assert why in str(caught.value)


def test_a_short_prompt_is_run_whole_wherever() -> None:
    assert Thinning().wish(request(tokens=1000)) is None


# --- how ---------------------------------------------------------------------------------------------


def test_a_prompt_is_read_in_chunks_and_weighed_once_and_the_system_prompt_is_run() -> None:
    weigher = Weighing(matters=range(3000, 3040))
    row = thinned(Thinning(weigher, is_able=True, tokens_max=256), request(boundaries=(700, 4990)))
    assert weigher.read_of["a"] == list(range(4999))
    assert weigher.parts == 0
    assert weigher.dropped == ["a"], "nothing is drafted for it"
    assert row.left_out[0][0] >= 700
    assert not any(first < 3040 and last > 3000 for first, last in row.left_out)
    assert row.cuts == [first for first, _ in row.left_out]
    assert sum(last - first for first, last in row.left_out) > 3000


def test_a_row_that_goes_is_not_read_any_more() -> None:
    thinning = Thinning(Weighing(), is_able=True)
    row = Scheduler(Policy(rows_max=4)).add(request(), 0.0, sparse=True)
    thinning.hold(row, WISH)
    thinning.drop("a")
    thinning.drop("a")
    assert not len(thinning)


def test_who_was_weighed_before_is_not_again() -> None:
    thinning, spans = Thinning(None, is_able=True), ((64, 128), (500, 4000))
    asked = request(left_out=spans)
    row = Scheduler(Policy(rows_max=4)).add(asked, 0.0, sparse=True)
    thinning.hold(row, thinning.wish(asked) or WISH)
    assert (row.left_out, row.held, len(thinning)) == (spans, False, 0)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(1, 80), st.booleans())
def test_the_plan_runs_all_but_what_is_left_out_each_where_it_stands(
    lengths: list[int], rest: int, has_states: bool
) -> None:
    """Kept and left out by turns, from the beginning."""
    edges = list(itertools.accumulate(lengths))
    spans = tuple(itertools.pairwise(edges))[::2]
    tokens = edges[-1] + rest + 1
    asked = request(tokens, left_out=spans, boundaries=(1, tokens - 1))
    scheduler = Scheduler(Policy(rows_max=4), PrefixIndex(Shape(has_states=has_states)))
    row = scheduler.add(asked, 0.0, sparse=True)
    Thinning(is_able=True).hold(row, WISH)
    run: list[int] = []
    for _ in range(10 * tokens):
        if row.phase is Phase.DECODE:
            break
        assert row.left == tokens - 1 - len(run) - sum(last - first for first, last in spans)
        for (chunk,) in scheduler.plan().groups:
            assert chunk.tokens == tuple(range(chunk.begin, chunk.begin + len(chunk.tokens)))
            assert row.gap(chunk.begin) == 0 or (chunk.begin - row.gap(chunk.begin), chunk.begin) in spans
            run += chunk.tokens
            scheduler.ran([chunk])
            if chunk.last:
                scheduler.started(row)
    assert run == [at for at in range(tokens - 1) if not any(first <= at < last for first, last in spans)]


def test_nobody_waits_for_it_and_it_waits_for_nobody() -> None:
    scheduler = Scheduler(Policy(rows_max=4), PrefixIndex(Shape()))
    first = scheduler.add(replace(request(), id="first", sparse=None), 0.0)
    sparse = scheduler.add(request(left_out=((64, 4000),)), 0.0, sparse=True)
    Thinning(is_able=True).hold(sparse, WISH)
    same = scheduler.add(replace(request(), id="same", sparse=None), 0.0)
    assert same.family == first.family != sparse.family
    assert scheduler.miss(sparse) == "sparse"
