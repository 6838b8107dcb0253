"""Circuit breakers: drafts rest when they lose time, a network when its drafts are not expected to pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.circuit_breaker import (
    LOST_STEPS_MAX,
    NETWORK_REST_STEPS,
    PROVEN_STEPS,
    REST_STEPS,
    REST_STEPS_MAX,
    STEP_COST_MAX,
    TRIED_COST_MAX,
    TRIED_GUESSES,
    VAIN_STEPS,
    CircuitBreaker,
    NetworkBreaker,
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


def end_trial(network: NetworkBreaker) -> None:
    while network.is_tried:
        network.tried(1, 0.1)


def let_down(network: NetworkBreaker) -> None:
    end_trial(network)
    for _ in range(VAIN_STEPS):
        network.on_hopeless_step()
    assert network.is_resting


def test_it_is_tried_first_and_then_asked() -> None:
    network = NetworkBreaker()
    for _ in range(TRIED_GUESSES):
        assert network.is_tried
        network.tried(1, 0.1)
    assert not network.is_tried
    assert not network.is_resting


@given(st.lists(st.floats(-5, 1000), min_size=TRIED_GUESSES, max_size=TRIED_GUESSES))
def test_costly_trials_are_fewer_but_more_than_one(costs: list[float]) -> None:
    network, tried, spent = NetworkBreaker(), 0, 0.0
    for cost in costs:
        if network.is_tried:
            network.tried(1, cost)
            tried, spent = tried + 1, spent + max(0.0, cost)
    assert tried >= 2
    assert not network.is_tried
    if spent < TRIED_COST_MAX:
        assert tried == TRIED_GUESSES


def test_each_rest_is_longer_and_ends_with_a_trial() -> None:
    network, rests = NetworkBreaker(), []
    for _ in range(8):
        let_down(network)
        rests.append(rested(network))
        assert network.is_tried
    assert rests[:3] == [NETWORK_REST_STEPS, 2 * NETWORK_REST_STEPS, 4 * NETWORK_REST_STEPS]
    assert rests[-1] == REST_STEPS_MAX


def test_a_step_now_and_then_that_expects_nothing_is_not_the_end() -> None:
    network = NetworkBreaker()
    end_trial(network)
    for _ in range(10 * VAIN_STEPS):
        network.on_hopeless_step()
        network.used()
    assert not network.is_resting


def test_once_it_was_of_use_the_next_rest_is_short() -> None:
    network = NetworkBreaker()
    for _ in range(3):
        let_down(network)
        rested(network)
    end_trial(network)
    for _ in range(PROVEN_STEPS):
        network.used()
    let_down(network)
    assert rested(network) == PROVEN_STEPS


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


def test_rests_of_all_drafts_are_longer_each_time_and_losses_are_small_beside_it() -> None:
    drafts, rests = SpeculationBreaker(), []
    for _ in range(10):
        assert lost(drafts) <= 1.5 * LOST_STEPS_MAX
        rests.append(rested(drafts))
    assert rests[:3] == [REST_STEPS, 2 * REST_STEPS, 4 * REST_STEPS]
    assert rests[-1] == REST_STEPS_MAX


def test_a_gain_makes_the_next_rest_short_again() -> None:
    drafts = SpeculationBreaker()
    for _ in range(3):
        lost(drafts)
        rested(drafts)
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
