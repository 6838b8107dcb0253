"""The prefill policy on simulated machines, compared with prefill without a bound on gaps."""

from __future__ import annotations

from functools import cache

import pytest

from bench.schedules import MACHINES, ROWS_MAX, SCENARIOS, Figures, Machine, measure
from worker.core.prefill import PREFILL_SHARE
from worker.core.scheduler import SchedulerConfig

TARGET_S = 0.1
SLOW = [machine for machine in MACHINES if machine.decode > TARGET_S / 3]
BURSTS = [name for name in SCENARIOS if "agents" not in name and "poisson" not in name and "+" not in name]
"""Scenarios in which all requests come together."""
ANYTHING_S = 60.0
"""A target that never limits a chunk."""


@cache
def figures(machine: Machine, scenario: str, target_s: float = TARGET_S) -> Figures:
    config = SchedulerConfig(rows_max=ROWS_MAX, inter_token_target_s=target_s)
    return measure(machine, SCENARIOS[scenario], config, seeds=6)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("machine", SLOW, ids=lambda machine: machine.name)
def test_slow_decode_steps_do_not_starve_prefill(machine: Machine, scenario: str) -> None:
    ours, greedy = figures(machine, scenario), figures(machine, scenario, ANYTHING_S)
    assert ours.done_mean <= 1.6 * greedy.done_mean


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_gaps_stay_near_the_target_or_within_their_maximum(machine: Machine, scenario: str) -> None:
    decode_s = machine.decode_s(ROWS_MAX)
    single_s = max(SchedulerConfig(ROWS_MAX).inter_token_s_max, 2 * decode_s)
    bound_s = max(TARGET_S, min((1 + PREFILL_SHARE) * decode_s, single_s))
    if scenario in BURSTS:
        bound_s = single_s
    assert figures(machine, scenario).gap_p99 <= 1.1 * bound_s


@pytest.mark.parametrize("scenario", BURSTS)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_burst_completes_as_soon_as_without_bounds_on_gaps(machine: Machine, scenario: str) -> None:
    ours, greedy = figures(machine, scenario), figures(machine, scenario, ANYTHING_S)
    assert ours.done_mean <= 1.15 * greedy.done_mean


@pytest.mark.parametrize("machine", SLOW, ids=lambda machine: machine.name)
def test_first_burst_of_a_worker_is_not_starved(machine: Machine) -> None:
    config = SchedulerConfig(rows_max=ROWS_MAX, inter_token_target_s=TARGET_S)
    cold = measure(machine, SCENARIOS["16 long"], config, seeds=3, cold=True)
    assert cold.done_mean <= 1.2 * figures(machine, "16 long").done_mean
