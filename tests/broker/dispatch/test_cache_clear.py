"""Cache-clear order: over once each worker has answered or is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch.cache_clear import CacheClear
from tests.factories import cleared

WORKERS = ["w0", "w1", "w2"]


@given(
    st.sets(st.sampled_from(WORKERS), min_size=1),
    st.lists(st.tuples(st.sampled_from([*WORKERS, "stranger"]), st.booleans()), max_size=8),
)
def test_whatever_is_said_every_answer_counts_once_and_the_end_is_told(
    asked: set[str], history: list[tuple[str, bool]]
) -> None:
    over: list[bool] = []
    order = CacheClear("c", {worker: f"model of {worker}" for worker in asked})
    order.on_over = lambda: over.append(order.over)
    answered, lost = list[str](), list[str]()
    for worker, answers in history:
        awaited = worker in asked and worker not in [*answered, *lost]
        if answers:
            assert order.answer(cleared(worker, "c", 5)) == awaited
            answered += [worker] if awaited else []
        else:
            order.lose(worker)
            lost += [worker] if awaited else []
        assert order.over == bool(over) == (bool(lost) or asked == {*answered, *lost})
    assert [(model, message.incarnation) for model, message in order.freed] == [
        (f"model of {worker}", worker) for worker in answered
    ]
    assert order.died == (f"model of {lost[-1]}" if lost else None)
    assert set(order.awaited) == asked - {*answered, *lost}
    assert all(over)
