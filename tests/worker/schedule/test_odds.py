"""How often drafts are right, and what steps cost that try them: what is expected, and what was seen."""

from __future__ import annotations

import math

import pytest

from worker.schedule.odds import PLAIN_LAPS, Costs, Odds


def test_odds_begin_as_usual_and_become_what_is_seen() -> None:
    odds = Odds()
    assert odds.of(3) < odds.of(8) < odds.of(16)
    for _ in range(100):
        odds.learn(16, right=0, tried=4)
        odds.learn(3, right=4, tried=4)
    assert odds.of(16) < 0.15
    assert odds.of(3) > 0.9


def test_costs_are_guessed_until_they_are_measured() -> None:
    costs = Costs()
    assert costs.of(1, 3) == math.inf
    for _ in range(PLAIN_LAPS):
        costs.learn(1, 0, 0.010)
    assert 1.0 < costs.of(1, 3) < costs.of(1, 9) < math.inf
    costs.learn(1, 4, 0.012)
    assert costs.of(1, 4) == pytest.approx(1.2)
    costs.learn(1, 4, 5.0)
    assert costs.of(1, 4) < 2, "one that is far off does not count for all it is"


def test_what_is_not_measured_costs_as_what_is_most_like_it() -> None:
    costs = Costs(column_price=0.5)
    for rows in (1, 2, 16):
        for _ in range(PLAIN_LAPS):
            costs.learn(rows, 0, 1.0)
    assert costs.of(1, 3) == costs.of(16, 3) == pytest.approx(2.0)
    assert costs.knows_price(1)
    assert not costs.knows_price(16)
    costs.learn(16, 3, 1.2)
    assert costs.knows_price(16)
    assert costs.of(16, 3) == pytest.approx(1.2)
    assert costs.of(16, 16) == pytest.approx(2.5), "as others of so many rows"
    assert costs.of(2, 3) == pytest.approx(2.0), "as those of one row, which are nearer"
    assert costs.of(1, 16) == pytest.approx(8.5)


def test_a_first_step_that_is_slow_is_believed_when_another_is() -> None:
    costs = Costs(column_price=0.1)
    for _ in range(PLAIN_LAPS):
        costs.learn(4, 0, 1.0)
    costs.learn(4, 3, 9.0)
    assert costs.of(4, 3) == pytest.approx(1.2)
    costs.learn(4, 3, 3.0)
    assert costs.of(4, 3) == pytest.approx(3.0)
