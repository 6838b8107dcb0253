"""Sparse prefill: which spans of long prompts are skipped, for which requests, and how they are scored."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import RequestError
from protocol.types import SparsePrefill
from tests.factories import engine_request
from tests.worker.scorers import Weigher
from worker.core.prefix.index import PrefixIndex
from worker.core.rows import Phase, Row
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.core.sparse_prefill import CHUNK_TOKENS, HEAD_TOKENS, TAIL_TOKENS, SparsePrefillQueue, least
from worker.values import CacheSpec, EngineRequest, SamplingParams

WISH = SparsePrefill(keep=0.3, above=1000)


@dataclass
class Weighing(Weigher):
    """An importance scorer that scores only the tokens in `matters`, and needs `parts` calls."""

    matters: Sequence[int] = ()
    parts: int = 3

    def score_tokens(self, row: str, last: int) -> list[float] | None:
        self.parts -= 1
        if self.parts > 0:
            return None
        return [float(token in self.matters) for token in self.read_of[row]]


def request(tokens: int = 5000, id: str = "a", **fields: Any) -> EngineRequest:
    return engine_request(id, tokens, **{"max_tokens": 100, "sparse": WISH, **fields})


def holds(sparse_prefill: SparsePrefillQueue, asked: EngineRequest) -> bool:
    """Return whether a request's prompt waits to be scored."""
    row = Scheduler(SchedulerConfig(rows_max=4)).add(asked, 0.0)
    sparse_prefill.hold(row)
    sparse_prefill.drop(row)
    return row.is_blocked


def thinned(sparse_prefill: SparsePrefillQueue, asked: EngineRequest) -> Row:
    """Return the row of a request whose prompt has been scored."""
    scheduler = Scheduler(SchedulerConfig(rows_max=4))
    row = scheduler.add(asked, 0.0)
    sparse_prefill.hold(row)
    assert len(sparse_prefill.rows) == 1
    clock = itertools.count(0.0, 0.01)
    for _ in range(1000):
        if not sparse_prefill.rows:
            return row
        assert row.is_blocked
        sparse_prefill.read(sparse_prefill.rows[0], lambda: next(clock), 0.005)
    raise AssertionError("the prompt is never scored")


@settings(max_examples=50)
@given(st.integers(1, 3000), st.randoms(use_true_random=False), st.floats(0.05, 1.0), st.integers(0, 500))
def test_spans_are_ordered_apart_and_enough(count: int, dice: random.Random, keep: float, dense: int) -> None:
    digits = dice.choice((0, 1, 9))  # equal ones are few or many
    spans = least([round(dice.random(), digits) for _ in range(count)], keep, dense)
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(set(edges)), "spans must not touch each other"
    left_out = sum(last - first for first, last in spans)
    assert count - left_out >= keep * count
    if spans:
        assert spans[0][0] >= max(dense, HEAD_TOKENS)
        assert spans[-1][1] <= count - TAIL_TOKENS
        room = count - max(dense, HEAD_TOKENS) - TAIL_TOKENS
        assert left_out >= min(room, (1 - keep) * count) - 2 * CHUNK_TOKENS


def test_most_important_tokens_are_run() -> None:
    weights = [0.0] * 4000
    weights[2000:2020] = [1.0] * 20
    weights[3000] = 0.5
    spans = least(weights, 0.2, 0)
    for place in (2000, 2019, 3000):
        assert not any(first <= place < last for first, last in spans)


def test_a_request_that_says_nothing_gets_what_is_usual() -> None:
    asked = request(sparse=None)
    assert not holds(SparsePrefillQueue(Weighing(), is_able=True), asked)
    usual = SparsePrefillQueue(Weighing(), WISH, is_able=True)
    assert holds(usual, asked)
    assert not holds(usual, request(sparse=SparsePrefill(keep=1.0)))
    assert not holds(usual, request(tokens=1000, sparse=None))
    assert not holds(usual, request(sparse=None, echo=True, sampling=SamplingParams(logprobs=0)))
    assert not holds(SparsePrefillQueue(None, WISH, is_able=True), asked)
    assert not holds(SparsePrefillQueue(Weighing(), WISH), asked)


def test_unsupported_sparse_prefill_request_is_refused_with_a_reason() -> None:
    scored = request(echo=True, sampling=SamplingParams(logprobs=0))
    for sparse_prefill, asked, why in (
        (SparsePrefillQueue(Weighing()), request(), "layers"),
        (SparsePrefillQueue(None, is_able=True), request(), "--draft-model"),
        (SparsePrefillQueue(Weighing(), is_able=True), scored, "images or"),
        (SparsePrefillQueue(Weighing()), request(left_out=((64, 96),)), "layers"),
    ):
        with pytest.raises(RequestError, match=why) as caught:
            holds(sparse_prefill, asked)
        assert caught.value.param == "sparse_prefill"


def test_a_prompt_is_read_in_chunks_and_weighed_once_and_the_system_prompt_is_run() -> None:
    importance_scorer = Weighing(matters=range(3000, 3040))
    sparse_prefill = SparsePrefillQueue(importance_scorer, is_able=True, tokens_max=256)
    row = thinned(sparse_prefill, request(boundaries=(700, 4990)))
    assert importance_scorer.read_of["a"] == list(range(4999))
    assert importance_scorer.parts == 0
    assert importance_scorer.dropped == ["a"], "a sparse row gets no drafts"
    assert row.left_out[0][0] >= 700
    assert not any(first < 3040 and last > 3000 for first, last in row.left_out)
    assert row.snapshot_positions == [first for first, _ in row.left_out]
    assert sum(last - first for first, last in row.left_out) > 3000


def test_row_with_precomputed_skipped_spans_is_not_scored_again() -> None:
    sparse_prefill, spans = SparsePrefillQueue(None, is_able=True), ((64, 128), (500, 4000))
    asked = request(left_out=spans)
    row = Scheduler(SchedulerConfig(rows_max=4)).add(asked, 0.0)
    sparse_prefill.hold(row)
    assert (row.left_out, row.is_blocked, len(sparse_prefill.rows)) == (spans, False, 0)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(1, 80), st.booleans())
def test_the_plan_runs_all_kept_tokens_in_place(lengths: list[int], rest: int, has_states: bool) -> None:
    """`lengths` alternates between kept and skipped spans, from the beginning."""
    edges = list(itertools.accumulate(lengths))
    spans = tuple(itertools.pairwise(edges))[::2]
    tokens = edges[-1] + rest + 1
    asked = request(tokens, left_out=spans, boundaries=(1, tokens - 1))
    scheduler = Scheduler(SchedulerConfig(rows_max=4), PrefixIndex(CacheSpec(has_states=has_states)))
    row = scheduler.add(asked, 0.0)
    SparsePrefillQueue(is_able=True).hold(row)
    run: list[int] = []
    for _ in range(10 * tokens):
        if row.phase is Phase.DECODE:
            break
        for (chunk,) in scheduler.plan().groups:
            assert chunk.tokens == tuple(range(chunk.begin, chunk.begin + len(chunk.tokens)))
            assert row.gap(chunk.begin) == 0 or (chunk.begin - row.gap(chunk.begin), chunk.begin) in spans
            run += chunk.tokens
            scheduler.ran([chunk])
            if chunk.last:
                scheduler.started(row)
    assert run == [at for at in range(tokens - 1) if not any(first <= at < last for first, last in spans)]


def test_sparse_row_does_not_share_prefixes_with_dense_rows() -> None:
    scheduler = Scheduler(SchedulerConfig(rows_max=4), PrefixIndex(CacheSpec()))
    first = scheduler.add(request(id="first", sparse=None), 0.0)
    sparse = scheduler.add(request(left_out=((64, 4000),)), 0.0)
    SparsePrefillQueue(is_able=True).hold(sparse)
    same = scheduler.add(request(id="same", sparse=None), 0.0)
    assert same.prompt_group == first.prompt_group != sparse.prompt_group
    assert scheduler.miss(sparse) == "request"
