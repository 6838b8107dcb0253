"""A network is tried before anybody is fed what it guesses, and rests where nothing is expected of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.trust import (
    PROVEN_STEPS,
    REST_STEPS,
    REST_STEPS_MAX,
    REST_STEPS_PROVEN,
    TRIED_COST_MAX,
    TRIED_GUESSES,
    VAIN_STEPS,
    Trust,
)


def rested(trust: Trust) -> int:
    """How many steps pass until it is tried again."""
    steps = 0
    while trust.is_resting:
        is_over = trust.pass_()
        steps += 1
        assert is_over is not trust.is_resting
    return steps


def end_trial(trust: Trust) -> None:
    while trust.is_tried:
        trust.tried(1, 0.1)


def let_down(trust: Trust) -> None:
    end_trial(trust)
    for _ in range(VAIN_STEPS):
        trust.vain()
    assert trust.is_resting


def test_it_is_tried_first_and_then_asked() -> None:
    trust = Trust()
    for _ in range(TRIED_GUESSES):
        assert trust.is_tried
        trust.tried(1, 0.1)
    assert not trust.is_tried
    assert not trust.is_resting


@given(st.lists(st.floats(-5, 1000), min_size=TRIED_GUESSES, max_size=TRIED_GUESSES))
def test_what_is_dear_is_tried_less_often_but_more_than_once(costs: list[float]) -> None:
    trust, tried, spent = Trust(), 0, 0.0
    for cost in costs:
        if trust.is_tried:
            trust.tried(1, cost)
            tried, spent = tried + 1, spent + max(0.0, cost)
    assert tried >= 2
    assert not trust.is_tried
    if spent < TRIED_COST_MAX:
        assert tried == TRIED_GUESSES


def test_each_rest_is_longer_and_ends_with_a_trial() -> None:
    trust, rests = Trust(), []
    for _ in range(8):
        let_down(trust)
        rests.append(rested(trust))
        assert trust.is_tried
    assert rests[:3] == [REST_STEPS, 2 * REST_STEPS, 4 * REST_STEPS]
    assert rests[-1] == REST_STEPS_MAX


def test_a_step_now_and_then_that_expects_nothing_is_not_the_end() -> None:
    trust = Trust()
    end_trial(trust)
    for _ in range(10 * VAIN_STEPS):
        trust.vain()
        trust.used()
    assert not trust.is_resting


def test_once_it_was_of_use_the_next_rest_is_short() -> None:
    trust = Trust()
    for _ in range(3):
        let_down(trust)
        rested(trust)
    end_trial(trust)
    for _ in range(PROVEN_STEPS):
        trust.used()
    let_down(trust)
    assert rested(trust) == REST_STEPS_PROVEN
