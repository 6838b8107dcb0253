"""Cost model of requests, and throughput estimates of workers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dispatch.cost_model import Throughput, ThroughputEstimate, cost_s, left_s
from broker.dispatch.flight import Attempt, Flight
from protocol.messages import Embed, Finished, Generate
from protocol.types import Timings, TokenizeOptions
from tests.factories import delta, embed, finished, request

SPEED = Throughput(prompt=100.0, answer=10.0)


def end(
    prompt: int, answer: int, *, cached: int = 0, prefill_s: float = 0.0, decode_s: float = 0.0
) -> Finished:
    timings = Timings(prefill_s=prefill_s, decode_s=decode_s)
    return finished("w", "a", answer, cached, prompt=prompt, timings=timings)


def assigned(asked: Generate | Embed, *, prompt_tokens: int = 0, spared: float = 0.0) -> Flight:
    flight = Flight(asked, "m", opened_at=0.0, waiting_since=0.0, prompt_tokens=prompt_tokens)
    flight.attempt = Attempt("a", "w", began_at=0.0, spared=spared)
    flight.attempts = 1
    return flight


def test_a_speed_is_what_was_run_over_its_time_and_follows_what_is_quick() -> None:
    throughput = ThroughputEstimate()
    throughput.observe(end(1000, 7, cached=990, prefill_s=1.0, decode_s=1.0))  # too short to measure
    throughput.observe(end(1000, 50))  # and this took no time
    assert (throughput.prompt, throughput.answer) == (None, None)
    throughput.observe(end(1100, 64, cached=100, prefill_s=2.0, decode_s=4.0))
    assert (throughput.prompt, throughput.answer) == (500.0, 16.0)
    throughput.observe(end(1000, 80, prefill_s=1.0, decode_s=8.0))
    assert (throughput.prompt, throughput.answer) == (pytest.approx(650.0), pytest.approx(15.82))


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.floats(0, 1e9), st.floats(0, 1e9))
def test_whatever_a_worker_says_of_its_times_a_speed_is_one(
    prompt: int, answer: int, prefill_s: float, decode_s: float
) -> None:
    throughput = ThroughputEstimate()
    throughput.observe(end(prompt, answer, prefill_s=prefill_s, decode_s=decode_s))
    speed = throughput.speed(Throughput())
    assert 0 < speed.prompt < math.inf
    assert 0 < speed.answer < math.inf


def test_a_request_costs_its_prompt_and_an_answer_as_long_as_most_or_as_it_may_be() -> None:
    asked = request("a", prompt=None, tokens=[1] * 200)
    assert cost_s(asked, SPEED, 50.0) == 2.0 + 5.0
    assert cost_s(replace(asked, max_tokens=10), SPEED, 50.0) == 2.0 + 1.0
    assert cost_s(asked, SPEED, 50.0, prompt_tokens=1000) == 10.0 + 5.0
    assert cost_s(replace(asked, tokenizing=TokenizeOptions()), SPEED, 50.0) == 2.0
    texts = embed(["a" * 400])
    assert cost_s(texts, SPEED, 50.0) == pytest.approx(1.0, rel=0.05)


def test_remaining_cost_is_uncached_prompt_plus_remaining_output() -> None:
    asked = request("a", max_tokens=100)
    new = assigned(asked, prompt_tokens=400, spared=0.75)
    assert left_s([new], SPEED, 50.0) == 1.0 + 5.0
    assert new.attempt is not None
    for number in range(80):
        new.accept_delta(delta(sequence=number, tokens=[number]), 0.0)
    assert left_s([new], SPEED, 50.0) == 2.0, "the prompt is prefilled and twenty tokens remain"
    assert left_s([new, new], SPEED, 50.0) == 4.0
    again = assigned(asked, prompt_tokens=400)
    again.tokens = list(range(80))
    assert left_s([again], SPEED, 50.0) == 4.8 + 2.0, "the other worker's tokens must be prefilled"
    texts = assigned(embed(["a"] * 4), prompt_tokens=400)
    assert texts.attempt is not None
    texts.attempt.deltas, texts.answered = 1, {0, 2, 3}
    assert left_s([texts], SPEED, 50.0) == 1.0
