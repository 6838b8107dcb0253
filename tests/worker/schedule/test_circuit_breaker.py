"""Circuit breakers: drafts rest when they lose time, a network when its drafts are not expected to pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.circuit_breaker import (
    LOST_STEPS_MAX,
    REST_STEPS,
    REST_STEPS_MAX,
    STEP_COST_MAX,
    CircuitBreaker,
    SpeculationBreaker,
)


def rested(breaker: CircuitBreaker) -> int:
    """Return the number of steps until the rest ends."""
    steps = 0
    while breaker.is_resting:
        is_over = breaker.on_step()
        steps += 1
        assert is_over is not breaker.is_resting
    return steps


def lost(drafts: SpeculationBreaker) -> float:
    """Return the time lost until drafts rest, in plain steps."""
    total = 0.0
    while not drafts.is_resting:
        drafts.learn(1.0, 1.5)
        total += 0.5
    return total


@given(st.lists(st.tuples(st.floats(1, 16), st.floats(0, 1)), max_size=200))
def test_speculation_that_covers_its_cost_continues(steps: list[tuple[float, float]]) -> None:
    drafts = SpeculationBreaker()
    for tokens, share in steps:
        drafts.learn(tokens, tokens * share)
        assert not drafts.is_resting


def test_rests_of_all_drafts_are_longer_each_time_until_there_is_a_gain() -> None:
    drafts, rests = SpeculationBreaker(), []
    for _ in range(10):
        assert lost(drafts) <= 1.5 * LOST_STEPS_MAX
        rests.append(rested(drafts))
    assert rests[:3] == [REST_STEPS, 2 * REST_STEPS, 4 * REST_STEPS]
    assert rests[-1] == REST_STEPS_MAX
    for _ in range(5):
        drafts.learn(3.0, 1.5)
    lost(drafts)
    assert rested(drafts) == REST_STEPS


def test_one_slow_step_is_not_the_end() -> None:
    drafts = SpeculationBreaker()
    drafts.learn(1.0, 1000.0)
    assert not drafts.is_resting
    drafts.learn(1.0, STEP_COST_MAX)
    assert drafts.is_resting
    assert rested(drafts) == pytest.approx(REST_STEPS)
