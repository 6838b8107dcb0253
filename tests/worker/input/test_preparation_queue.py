"""Preparation queue: bounded, shortest first, and fair between clients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import Code, RequestError
from protocol.types import Media, StructuredOutput, ToolCallConstraint
from tests.factories import embed, request
from worker.input.pool import (
    BYTES_MAX,
    COST_PER_S,
    REQUESTS_MAX,
    SHORT_COST_MAX,
    PreparationQueue,
    QueueEntry,
    entry_of,
)

LONG = SHORT_COST_MAX + 1


def entry(id: str, client: str = "a", cost: int = 1, arrived_at: float = 0.0, nbytes: int = 1) -> QueueEntry:
    return QueueEntry(id, client, nbytes, cost, arrived_at)


def filled(*entries: QueueEntry) -> PreparationQueue:
    queue = PreparationQueue()
    for each in entries:
        queue.add(each)
    return queue


def drain(queue: PreparationQueue, *, short_only: bool = False) -> list[str]:
    """Take and finish all requests; return their ids in this order."""
    ids = []
    while (taken := queue.take(0.0, short_only=short_only)) is not None:
        queue.finish(taken.id)
        ids.append(taken.id)
    return ids


def test_queue_lets_no_request_pass_a_long_one_that_has_waited_its_own_cost() -> None:
    late = [entry(f"late-{n}", cost=LONG, arrived_at=10.0 + n) for n in range(50)]
    queue = filled(entry("longest", cost=10 * COST_PER_S), *late)
    assert drain(queue).index("longest") <= 1


def test_queue_refuses_a_request_beyond_its_number() -> None:
    queue = filled(*(entry(f"{n}") for n in range(REQUESTS_MAX)))
    with pytest.raises(RequestError, match="no room") as caught:
        queue.add(entry("one more"))
    assert caught.value.code is Code.TEXT_GENERATION_BUSY
    assert caught.value.kind.status == 503
    assert queue.status(0.0).refused == 1
    assert queue.cancel("0")
    queue.add(entry("one more"))


def test_queue_refuses_a_request_beyond_its_bytes_until_others_have_finished() -> None:
    queue = filled(entry("a", nbytes=BYTES_MAX))
    with pytest.raises(RequestError, match="no room"):
        queue.add(entry("b"))
    assert queue.take(0.0, short_only=False) is not None
    with pytest.raises(RequestError, match="no room"):
        queue.add(entry("b"))
    queue.finish("a")
    queue.add(entry("b", nbytes=BYTES_MAX + 1))  # alone
    assert len(queue) == 1


CLIENTS = st.sampled_from("abc")
COSTS = st.integers(1, 4 * SHORT_COST_MAX)


@settings(max_examples=50)
@given(st.lists(st.tuples(CLIENTS, COSTS, st.booleans(), st.booleans()), max_size=60))
def test_queue_takes_every_request_once_and_in_order(steps: Sequence[tuple[str, int, bool, bool]]) -> None:
    queue, waiting, taken = PreparationQueue(), dict[str, QueueEntry](), set[str]()
    for number, (client, cost, takes, short_only) in enumerate(steps):
        added = entry(f"{number}", client, cost, float(number), cost)
        queue.add(added)
        waiting[added.id] = added
        if takes and (found := queue.take(float(number), short_only=short_only)) is not None:
            assert found == waiting.pop(found.id)
            assert found.id not in taken
            taken.add(found.id)
            assert found.is_short or not short_only
            rivals = [each for each in waiting.values() if each.client == found.client]
            same = [each for each in rivals if each.is_short == found.is_short]
            assert all(found.rank <= each.rank for each in same)
    assert len(queue) == len(waiting) + len(taken)
    assert queue.status(0.0).bytes == sum(cost for _, cost, _, _ in steps)
    assert sorted(drain(queue)) == sorted(waiting)
    for id in taken:
        queue.finish(id)
    assert (len(queue), queue.status(0.0).bytes) == (0, 0)


@settings(max_examples=50)
@given(st.lists(st.tuples(CLIENTS, COSTS), min_size=1, max_size=60))
def test_queue_never_gives_a_client_two_turns_while_another_waits(jobs: Sequence[tuple[str, int]]) -> None:
    entries = [entry(f"{n}", client, LONG + cost, 0.0, cost) for n, (client, cost) in enumerate(jobs)]
    queue, clients = filled(*entries), {each.id: each.client for each in entries}
    order = [clients[id] for id in drain(queue)]
    for place, (one, following) in enumerate(pairwise(order)):
        assert one != following or set(order[place:]) == {one}


def test_entry_of_a_grammar_is_long_whatever_its_size() -> None:
    for fields in (
        {"form": StructuredOutput(kind="regex", text="a")},
        {"calling": ToolCallConstraint(required=True)},
        {"calling": ToolCallConstraint(strict=["a"])},
    ):
        assert not entry_of(request(**fields), (), 0.0).is_short
    assert entry_of(request(calling=ToolCallConstraint(single=True)), (), 0.0).is_short


def test_entry_of_images_is_long_whatever_their_size() -> None:
    asked = request(media=[Media(frame=0, mime="image/png", sha256="")])
    small, large = (entry_of(asked, [bytes(count)], 0.0) for count in (1, 2**20))
    assert (small.is_short, large.cost - small.cost) == (False, 2**20 - 1)


def test_entry_counts_the_bytes_of_messages_texts_and_media() -> None:
    text = "x" * 1000
    for asked in (request(prompt=text), request(messages=[{"role": "user", "content": text}]), embed([text])):
        assert 1000 <= entry_of(asked, (), 0.0).nbytes < 1100
    assert entry_of(request(), [text.encode()], 0.0).nbytes >= 1000
