"""Drafts rest where they lose time, for longer each time, and may be tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.worth import LOST_STEPS_MAX, REST_STEPS, REST_STEPS_MAX, STEP_COST_MAX, Worth


def rested(worth: Worth) -> int:
    """How many plain steps pass until drafts may be made again."""
    steps = 0
    while worth.is_resting:
        worth.pass_()
        steps += 1
    return steps


def lost(worth: Worth) -> float:
    """Of plain steps' time, until it rests."""
    total = 0.0
    while not worth.is_resting:
        worth.learn(1.0, 1.5)
        total += 0.5
    return total


@given(st.lists(st.tuples(st.floats(1, 16), st.floats(0, 1)), max_size=200))
def test_what_brings_as_much_as_it_costs_goes_on(steps: list[tuple[float, float]]) -> None:
    worth = Worth()
    for tokens, share in steps:
        worth.learn(tokens, tokens * share)
        assert not worth.is_resting


def test_each_rest_is_longer_and_losses_are_small_beside_it() -> None:
    worth, rests = Worth(), []
    for _ in range(10):
        assert lost(worth) <= 1.5 * LOST_STEPS_MAX
        rests.append(rested(worth))
    assert rests[:3] == [REST_STEPS, 2 * REST_STEPS, 4 * REST_STEPS]
    assert rests[-1] == REST_STEPS_MAX


def test_a_gain_makes_the_next_rest_short_again() -> None:
    worth = Worth()
    for _ in range(3):
        lost(worth)
        rested(worth)
    for _ in range(5):
        worth.learn(3.0, 1.5)
    lost(worth)
    assert rested(worth) == REST_STEPS


def test_one_slow_step_is_not_the_end() -> None:
    worth = Worth()
    worth.learn(1.0, 1000.0)
    assert not worth.is_resting
    worth.learn(1.0, STEP_COST_MAX)
    assert worth.is_resting
    assert rested(worth) == pytest.approx(REST_STEPS)
