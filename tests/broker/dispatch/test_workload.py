"""What requests cost, and how fast workers are found to be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dispatch.flight import Flight, Leg
from broker.dispatch.workload import Pace, Speed, cost_s, left_s, usual_speed
from protocol.conversation import pack
from protocol.messages import Embed, Finished, Generate
from protocol.parts import Delta, Timings, Tokenizing, Usage
from tests.broker.dispatching import GATEWAY, request

SPEED = Speed(prompt=100.0, answer=10.0)


def end(
    prompt: int, answer: int, *, cached: int = 0, prefill_s: float = 0.0, decode_s: float = 0.0
) -> Finished:
    usage = Usage(prompt_tokens=prompt, completion_tokens=answer, cached_tokens=cached)
    timings = Timings(prefill_s=prefill_s, decode_s=decode_s)
    return Finished(incarnation="w", id="a", reason="stop", usage=usage, timings=timings)


def aboard(asked: Generate | Embed, *, prompt_tokens: int = 0, spared: float = 0.0) -> Flight:
    flight = Flight(asked, "m", opened_at=0.0, waiting_since=0.0, prompt_tokens=prompt_tokens)
    flight.leg = Leg("a", "w", began_at=0.0, spared=spared)
    flight.legs = 1
    return flight


def test_a_speed_is_what_was_run_over_its_time_and_follows_what_is_quick() -> None:
    pace = Pace()
    pace.observe(end(1100, 64, cached=100, prefill_s=2.0, decode_s=4.0))
    assert (pace.prompt, pace.answer) == (500.0, 16.0)
    pace.observe(end(1000, 80, prefill_s=1.0, decode_s=8.0))
    assert (pace.prompt, pace.answer) == (pytest.approx(650.0), pytest.approx(15.82))


def test_one_that_was_busy_now_and_then_is_not_taken_for_slow() -> None:
    busy, calm = Pace(), Pace()
    for number in range(40):
        calm.observe(end(1000, 80, prefill_s=1.0, decode_s=4.0))
        took = 4 if number % 3 else 1
        busy.observe(end(1000, 80, prefill_s=1.0 * took, decode_s=4.0 * took))
    assert busy.answer is not None
    assert calm.answer is not None
    assert 0.8 < busy.answer / calm.answer <= 1


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.floats(0, 1e9), st.floats(0, 1e9))
def test_whatever_a_worker_says_of_its_times_a_speed_is_one(
    prompt: int, answer: int, prefill_s: float, decode_s: float
) -> None:
    pace = Pace()
    pace.observe(end(prompt, answer, prefill_s=prefill_s, decode_s=decode_s))
    speed = pace.speed(Speed())
    assert 0 < speed.prompt < math.inf
    assert 0 < speed.answer < math.inf


def test_of_what_is_short_or_took_no_time_nothing_is_measured() -> None:
    pace = Pace()
    pace.observe(end(1000, 7, cached=990, prefill_s=1.0, decode_s=1.0))
    pace.observe(end(1000, 50))
    assert (pace.prompt, pace.answer) == (None, None)


def test_one_that_was_not_measured_is_taken_for_as_fast_as_the_others() -> None:
    assert usual_speed([Pace(), Pace(prompt=10.0), Pace(prompt=30.0, answer=5.0)]) == Speed(20.0, 5.0)
    assert usual_speed([]) == Speed()
    assert Pace(answer=7.0).speed(SPEED) == Speed(100.0, 7.0)


def test_a_request_costs_its_prompt_and_an_answer_as_long_as_most_or_as_it_may_be() -> None:
    asked = replace(request("a"), prompt=None, tokens=[1] * 200)
    assert cost_s(asked, SPEED, 50.0) == 2.0 + 5.0
    assert cost_s(replace(asked, max_tokens=10), SPEED, 50.0) == 2.0 + 1.0
    assert cost_s(asked, SPEED, 50.0, prompt_tokens=1000) == 10.0 + 5.0
    assert cost_s(replace(asked, tokenizing=Tokenizing()), SPEED, 50.0) == 2.0
    texts = Embed(incarnation=GATEWAY, id="e", texts=pack(["a" * 400]), count=1)
    assert cost_s(texts, SPEED, 50.0) == pytest.approx(1.0, rel=0.05)


def test_what_is_left_of_one_aboard_is_what_its_worker_has_not_and_what_it_has_not_answered() -> None:
    asked = replace(request("a"), max_tokens=100)
    new = aboard(asked, prompt_tokens=400, spared=0.75)
    assert left_s([new], SPEED, 50.0) == 1.0 + 5.0
    assert new.leg is not None
    for number in range(80):
        new.gain(Delta(id="a", sequence=number, tokens=[number]), 0.0)
    assert left_s([new], SPEED, 50.0) == 2.0, "its prompt has run, and it may have twenty tokens more"
    assert left_s([new, new], SPEED, 50.0) == 4.0
    again = aboard(asked, prompt_tokens=400)
    again.tokens = list(range(80))
    assert left_s([again], SPEED, 50.0) == 4.8 + 2.0, "behind another worker's tokens, which have to run"


def test_of_texts_those_that_are_answered_cost_nothing_more() -> None:
    texts = aboard(Embed(incarnation=GATEWAY, id="e", texts=pack(["a"] * 4), count=4), prompt_tokens=400)
    assert texts.leg is not None
    texts.leg.deltas, texts.answered = 1, {0, 2, 3}
    assert left_s([texts], SPEED, 50.0) == 1.0
