"""Rows in the loop: pacing, copies, preemption, deadlines, order and logprobs."""

from __future__ import annotations

import itertools

import pytest

from protocol.messages import Failed
from tests.worker.engines import House, breaking
from worker.core import engine_core as loop_module
from worker.core.batching_window import WINDOW_ALONE_S
from worker.values import SamplingParams


def paced(house: House) -> None:
    """Set the times: a prefill token takes 1 ms, a decode step 10 ms, and its dispatch almost nothing."""

    def take(kind: str, size: int) -> None:
        house.now += 0.001 * size if kind == "prefill" else 0.01 if size else 0.0001

    house.engine.takes = take


def test_a_running_stream_is_kept_waiting_no_longer_than_the_target() -> None:
    house = House(prefill_tokens=2048)
    paced(house)
    house.submit("stream", *range(1, 99), prompt=1, max_tokens=90)
    house.engine.at["step", 40] = lambda: house.submit("long", 5, prompt=1500)
    read_at: list[float] = []
    house.publish_also = lambda: read_at.append(house.now)
    house.run()
    gaps = [later - earlier for earlier, later in itertools.pairwise(read_at)]
    # No cost is known for the first chunk. Each of the others fits between two decode steps.
    assert house.engine.sizes[0] == 64
    assert set(house.engine.sizes[1:-1]) == {64}
    assert sorted(gaps)[-2] < 0.1


def test_time_in_which_nobody_took_what_was_said_is_no_decode_step() -> None:
    house = House(prefill_tokens=2048)
    paced(house)
    house.submit("stream", *range(1, 99), prompt=1, max_tokens=90)

    def clog() -> None:
        house.backlog = lambda: loop_module.OUTBOX_MESSAGES_MAX

    def wait() -> None:
        house.now += 100
        house.backlog = lambda: 0
        house.submit("long", 5, prompt=1500)

    house.engine.at["step", 40] = clog
    house.inbox.on_wait = wait
    house.run()
    assert set(house.engine.sizes[1:-1]) == {64}


@pytest.mark.parametrize("what", ["cancelled", "failed"])
def test_another_copy_takes_over_where_the_leader_is_gone(what: str) -> None:
    house = House(prefill_tokens=16)
    house.submit("a", 5, prompt=41)
    house.submit("b", 6, like="a")
    house.submit("c", 7, like="a")
    house.engine.at["prefill", 1] = breaking("it") if what == "failed" else lambda: house.drop("a")
    house.run()
    assert house.engine.forks == [("b", "c")]
    assert [house.text(id) for id in "bc"] == ["<6>", "<7>"]
    assert len(house.ends("a")) == (what == "failed")


def test_an_answer_ends_where_memory_does() -> None:
    house = House(bytes_max=128)
    house.submit("a", *range(1, 999), prompt=40, max_tokens=900)
    house.run()
    assert house.reason("a") == "length"
    assert len(house.tokens("a")) == 128 - 40


@pytest.mark.parametrize("where", ["waiting", "running"])
def test_a_request_ends_at_its_deadline_wherever_it_stands(where: str) -> None:
    house = House(rows_max=1)
    first, second = ("a", "late") if where == "waiting" else ("late", "a")
    house.submit(first, *range(1, 20), deadline_s=5.0 if first == "late" else None)
    house.submit(second, 7, deadline_s=5.0 if second == "late" else None)

    def pass_time() -> None:
        house.now += 1.0

    house.engine.at = {("step", n): pass_time for n in range(99)}
    house.run()
    end = house.end("late")
    assert isinstance(end, Failed)
    assert end.code == "deadline_exceeded"
    assert house.tokens("late") == ([1, 2, 3, 4] if where == "running" else [])
    assert house.reason("a") == "stop"


def test_log_probabilities_are_told_in_bytes_and_only_to_those_who_ask() -> None:
    house = House()
    house.submit("asks", 5, sampling=SamplingParams(logprobs=2))
    house.submit("asks not", 5)
    house.run()
    first, last = house.deltas("asks")
    [likelihood] = first.likelihoods
    assert (likelihood.bytes, likelihood.logprob) == (b"<5>", -0.25)
    assert likelihood.top == [(b"<5>", -0.25), (b"<9>", -2.0)]
    assert last.likelihoods == []
    assert all(delta.likelihoods == [] for delta in house.deltas("asks not"))


def test_an_idle_loop_waits_a_little_so_that_those_who_come_together_share_a_call() -> None:
    house = House(admission_window_s=0.005)
    house.submit("a", 5)

    def arrive() -> None:
        house.now += 0.002
        if len(house.inbox.timeouts) == 1:
            house.submit("b", 6)

    house.inbox.on_wait = arrive
    house.run()
    assert house.inbox.timeouts == pytest.approx([0.005, 0.003])
    assert house.engine.groups == [["a", "b"]]


def test_a_loop_that_is_full_or_busy_waits_for_nobody() -> None:
    house = House(admission_window_s=0.005, rows_max=1)
    house.submit("a", 5, 6, 7)
    house.engine.at["step", 1] = lambda: house.submit("b", 6)
    house.run()
    assert house.inbox.timeouts == []
    assert house.text("b") == "<6>"


def test_one_who_comes_alone_hardly_waits_until_requests_have_arrived_together() -> None:
    house = House(admission_window_s=0.005)
    for number, together in enumerate((1, 1, 2, 2)):
        for place in range(together):
            house.submit(f"{number} {place}", 11)
        house.run()
        house.now += 1
    assert house.inbox.timeouts == pytest.approx([0.005, WINDOW_ALONE_S, WINDOW_ALONE_S, 0.005])
