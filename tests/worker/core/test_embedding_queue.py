"""Batching queue of embeddings: which texts run together, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.worker.texts import prepared_texts
from worker.core.embedding_core import PADDED_SHARE, TEXTS_MAX, Batch, TextQueue
from worker.core.prefill import PrefillCostModel


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
