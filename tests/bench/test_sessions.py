"""Simulated agents on too little memory."""

from __future__ import annotations

import statistics

from bench.schedules import MACHINES
from bench.sessions import Figures, measure, scaled
from worker.core.sessions import HELD_S_MAX

SMALL = scaled(next(machine for machine in MACHINES if machine.name == "small"))


def _measure(agents: int, memory: float, *, named: bool = True) -> Figures:
    return measure(SMALL, agents, memory, share=1.0, named=named, seed=0)


def test_one_agent_computes_nothing_again_while_its_session_fits_the_memory() -> None:
    assert _measure(1, 1).cached > 0.95


def test_agents_that_do_not_fit_complete_sooner_if_those_that_began_go_on() -> None:
    named, unnamed = _measure(8, 2), _measure(8, 2, named=False)
    assert statistics.mean(unnamed.done_s) > 1.3 * statistics.mean(named.done_s)
    assert named.first_s < HELD_S_MAX + unnamed.first_s
