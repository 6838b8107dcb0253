"""The loop of an embedding model: ends, cancels, failures and batching, on a scripted model."""

from __future__ import annotations

import pytest

from protocol.errors import Code
from protocol.messages import CacheCleared, Failed, Finished
from tests.worker.texts import FAILING, House, prepared_texts, vector
from worker.core.commands import ClearPrefixes
from worker.core.engine_core import OUTBOX_MESSAGES_MAX
from worker.core.failures import FAILURES_MAX, EngineKeepsFailing
from worker.process.device_errors import DeviceError
from worker.values import PreparedTexts, Text


def failing(id: str) -> PreparedTexts:
    return PreparedTexts(id, (Text((FAILING, 5, 6)),))


def test_each_text_gets_its_own_vector_whatever_the_order_of_work() -> None:
    house = House(tokens_max=24)
    asked = prepared_texts("a", 3, 12, 1, 7, 12, 30, 2)
    house.submit(asked)
    house.run()
    assert house.vectors("a") == {place: vector(text) for place, text in enumerate(asked.texts)}
    end = house.end("a")
    assert isinstance(end, Finished)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (67, 0)
    assert house.encoder.batches[0] == [30]  # larger than a step's budget, so alone
    assert len(house.encoder.batches) > 2


def test_texts_of_several_requests_share_a_batch() -> None:
    house = House()
    house.submit(prepared_texts("a", 5), prepared_texts("b", 4, 4), prepared_texts("c", 5))
    house.run()
    assert house.encoder.batches == [[5, 4, 4, 5]]
    assert all(isinstance(house.end(id), Finished) for id in "abc")


def test_texts_answered_by_another_worker_are_not_run_again() -> None:
    house = House()
    asked = prepared_texts("a", 3, 4, 5, answered=frozenset({0, 2}))
    house.submit(asked, asked)  # nor is a request taken twice
    house.run()
    assert [*house.vectors("a")] == [1]
    assert house.encoder.batches == [[4]]
    end = house.end("a")
    assert isinstance(end, Finished)
    assert end.usage.prompt_tokens == 12


def test_a_request_whose_answer_lacks_its_end_alone_is_ended() -> None:
    house = House()
    house.submit(prepared_texts("a", 3, answered=frozenset({0})))
    house.run()
    assert isinstance(house.end("a"), Finished)
    assert house.encoder.batches == []


def test_a_cancel_is_heard_between_two_batches() -> None:
    house = House()
    house.submit(prepared_texts("a", *[40] * 50), prepared_texts("b", 3))
    house.encoder.at = {0: lambda: house.cancel("a")}
    house.run()
    assert house.end("a") is None
    assert isinstance(house.end("b"), Finished)
    assert len(house.encoder.batches) <= 2


def test_request_past_its_deadline_fails_alone() -> None:
    house = House()

    def tick() -> None:
        house.now += 1.0

    house.encoder.at = dict.fromkeys(range(99), tick)
    house.submit(prepared_texts("a", *[40] * 50, deadline_s=2.5), prepared_texts("b", *[30] * 9))
    house.run()
    end = house.end("a")
    assert isinstance(end, Failed)
    assert end.code == Code.DEADLINE_EXCEEDED
    assert isinstance(house.end("b"), Finished)


def test_texts_that_fail_fail_their_own_requests_alone_and_never_end_the_worker() -> None:
    house, bad = House(), [str(number) for number in range(3 * FAILURES_MAX)]
    house.submit(prepared_texts("a", 3), *map(failing, bad), prepared_texts("c", 3))
    house.run()
    for id in bad:
        end = house.end(id)
        assert isinstance(end, Failed)
        assert end.code == Code.ENGINE_ERROR
    assert all(isinstance(house.end(id), Finished) for id in "ac")


def test_an_error_of_the_gpu_ends_the_thread_at_once_and_fails_nobody() -> None:
    house = House()
    house.submit(prepared_texts("a", 3), prepared_texts("b", 3))

    def fail() -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Timeout.")

    house.encoder.at = {0: fail}
    with pytest.raises(DeviceError, match=r"the GPU failed: \[METAL\]"):
        house.run()
    assert house.end("a") is house.end("b") is None


def test_a_model_that_fails_on_everything_ends_the_thread() -> None:
    house = House()
    house.encoder.broken = True
    house.submit(*(prepared_texts(str(number), 3) for number in range(2 * FAILURES_MAX)))
    with pytest.raises(EngineKeepsFailing):
        house.run()


def test_it_ends_when_it_is_told_and_answers_for_a_cache_that_it_has_not() -> None:
    house = House()
    house.inbox.put(ClearPrefixes("clear-1"))
    house.submit(prepared_texts("a", 3))
    house.stop()
    house.loop.run()
    assert CacheCleared(incarnation="worker-1", id="clear-1", ram_bytes=0, disk_bytes=0) in house.said
    assert house.end("a") is None


def test_full_outbox_pauses_encoding() -> None:
    house = House()
    house.backlog = OUTBOX_MESSAGES_MAX
    house.submit(prepared_texts("a", 3))
    waits = iter(range(3))

    def full() -> int:
        if next(waits, None) is None:
            house.stop()
        return house.backlog

    object.__setattr__(house.loop.publisher, "backlog", full)
    house.loop.run()
    assert house.encoder.batches == []
