"""Step cost model: initial estimates and measurements."""

from __future__ import annotations

import math

import pytest

from worker.schedule.step_cost import LAPS_MIN, StepCostModel


def test_costs_are_guessed_until_they_are_measured() -> None:
    costs = StepCostModel()
    assert costs.of(1, 3) == math.inf
    for _ in range(LAPS_MIN):
        costs.learn(1, 0, 0.010)
    assert 1.0 < costs.of(1, 3) < costs.of(1, 9) < math.inf
    costs.learn(1, 4, 0.012)
    assert costs.of(1, 4) == pytest.approx(1.2)
    costs.learn(1, 4, 5.0)
    assert costs.of(1, 4) < 2, "an outlier must not count with its full weight"


def test_unmeasured_step_cost_is_estimated_from_the_nearest_measured_one() -> None:
    costs = StepCostModel(position_cost=0.5)
    for rows in (1, 2, 16):
        for _ in range(LAPS_MIN):
            costs.learn(rows, 0, 1.0)
    assert costs.of(1, 3) == costs.of(16, 3) == pytest.approx(2.0)
    assert costs.is_position_cost_measured(1)
    assert not costs.is_position_cost_measured(16)
    costs.learn(16, 3, 1.2)
    assert costs.is_position_cost_measured(16)
    assert costs.of(16, 3) == pytest.approx(1.2)
    assert costs.of(16, 16) == pytest.approx(2.5), "estimated from other steps of 16 rows"
    assert costs.of(2, 3) == pytest.approx(2.0), "estimated from steps of one row, the nearest"
    assert costs.of(1, 16) == pytest.approx(8.5)


def test_a_first_step_that_is_slow_is_believed_when_another_is() -> None:
    costs = StepCostModel(position_cost=0.1)
    for _ in range(LAPS_MIN):
        costs.learn(4, 0, 1.0)
    costs.learn(4, 3, 9.0)
    assert costs.of(4, 3) == pytest.approx(1.2)
    costs.learn(4, 3, 3.0)
    assert costs.of(4, 3) == pytest.approx(3.0)
