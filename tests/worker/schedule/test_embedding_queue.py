"""Batching queue of embeddings: which texts run together, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.worker.texts import prepared_texts
from worker.schedule.embedding_queue import PADDED_SHARE, TEXTS_MAX, Batch, TextQueue
from worker.schedule.prefill_cost import PrefillCostModel


def budget_of(tokens: int) -> PrefillCostModel:
    """Return a cost model that has measured enough to allow `tokens` tokens."""
    pace = PrefillCostModel(target_s=1.0, tokens_max=tokens)
    pace._tokens_measured = tokens
    return pace


def drained(queue: TextQueue, tokens: int) -> list[Batch]:
    batches = []
    while batch := queue.take(budget_of(tokens).budget(decoding=True)):
        batches.append(batch)
    return batches


lists = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=40), min_size=1, max_size=6)


@given(lists, st.integers(8, 256))
def test_each_text_is_taken_once_in_batches_that_fit(asked: list[list[int]], tokens: int) -> None:
    queue = TextQueue()
    for number, lengths in enumerate(asked):
        queue.add(prepared_texts(str(number), *lengths), 0.0)
    batches = drained(queue, tokens)
    taken = [(place.request.id, place.place) for batch in batches for place in batch]
    assert sorted(taken) == sorted(
        (str(number), place) for number, lengths in enumerate(asked) for place in range(len(lengths))
    )
    for batch in batches:
        lengths = [len(place.text.tokens) for place in batch]
        assert len(batch) == 1 or len(batch) * max(lengths) <= tokens
        assert len(batch) <= TEXTS_MAX
        guests = [len(p.text.tokens) for p in batch if p.request is not batch[0].request]
        assert all(length >= PADDED_SHARE * max(lengths) for length in guests)


@given(lists)
def test_batches_are_of_neighbours_in_length(asked: list[list[int]]) -> None:
    queue = TextQueue()
    queue.add(prepared_texts("a", *asked[0]), 0.0)
    lengths = [len(place.text.tokens) for batch in drained(queue, 64) for place in batch]
    assert lengths == sorted(asked[0], reverse=True)


def test_request_with_least_cost_so_far_leads_the_next_batch() -> None:
    queue = TextQueue()
    queue.add(prepared_texts("a", *[50] * 30), 0.0)
    queue.add(prepared_texts("b", *[10] * 30), 0.0)
    is_leader = [batch[0].request.id for batch in drained(queue, 50)][:12]
    assert is_leader[:2] == ["a", "b"]
    # Each request pays 50 per batch: one text of the first, five of the second.
    assert is_leader.count("a") == is_leader.count("b")


def test_no_stream_of_newcomers_keeps_a_list_waiting() -> None:
    queue = TextQueue()
    queue.add(prepared_texts("list", *[40] * 20), 0.0)
    for number in range(20):
        queue.add(prepared_texts(f"one {number}", 5), 0.0)
        for place in queue.take(budget_of(40).budget(decoding=True)):
            if not place.request.left:
                queue.drop(place.request.id)
    waiting = queue.get("list")
    assert waiting is not None
    assert len(waiting.left) <= 20 - 8


def test_the_smallest_priority_goes_first() -> None:
    queue = TextQueue()
    queue.add(prepared_texts("late", *[8] * 4, priority=1), 0.0)
    queue.add(prepared_texts("soon", *[8] * 4, priority=-1), 0.0)
    order = [place.request.id for batch in drained(queue, 16) for place in batch]
    assert order == ["soon"] * 4 + ["late"] * 4


def test_dropped_request_is_not_batched() -> None:
    queue = TextQueue()
    queue.add(prepared_texts("a", 3), 0.0)
    assert queue.drop("a") is not None
    assert queue.drop("a") is None
    assert drained(queue, 16) == []
    assert len(queue) == 0
