"""Agents with their conversations, and workers that remember what they ran: simulated, turn by turn."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dispatch.beginnings import beginnings
from broker.dispatch.flight import Flight
from broker.dispatch.routing import Method
from protocol.conversation import pack
from protocol.messages import Generate, Ready
from protocol.parts import Sampling
from tests.broker.dispatching import GATEWAY, Line, accepted, events, finished

AGENTS, TURNS = 8, 10
SYSTEM = "You are one of many agents. " * 60


@dataclass
class Simulation:
    """`stored`: what each worker has run; `lengths` of prompts and what of them was stored, in bytes."""

    line: Line
    dice: random.Random
    stored: dict[str, set[bytes]] = field(default_factory=dict)
    asked: int = 0
    cached: int = 0
    by_worker: Counter[str] = field(default_factory=Counter)

    def start(self, name: str) -> None:
        self.stored[name] = set()
        self.line.serving(name, rows=16)

    def board(self, agent: int, turn: int) -> Flight:
        said = [{"role": "user", "content": f"{agent} says {number}. " * 20} for number in range(turn + 1)]
        request = Generate(
            incarnation=GATEWAY,
            id=f"{agent}.{turn}",
            sampling=Sampling(seed=1),
            messages=pack([{"role": "system", "content": SYSTEM}, *said]),
            max_tokens=64,
        )
        flight = self.line.board(request)
        assert flight.leg is not None
        self._run(flight, flight.leg.worker)
        return flight

    def _run(self, flight: Flight, worker: str) -> None:
        prompt = beginnings(flight.request)
        known = [size for mark, size in prompt.marks if mark in self.stored[worker]]
        self.asked += prompt.size
        self.cached += max(known, default=0)
        self.stored[worker] |= {mark for mark, _ in prompt.marks}
        self.by_worker[worker] += 1

    def end(self, flight: Flight) -> None:
        leg = flight.leg
        assert leg is not None
        worker, id = leg.worker, leg.id
        self.line.say(worker, accepted(worker, id), events(worker, id, "x"), finished(worker, id, 1))
        context = self.line.contexts.pop(0)
        context.__exit__(None, None, None)


def simulated(seed: int, workers: int, method: Method) -> Simulation:
    """Agents that ask again and again, each when its last answer has come, those who are aboard at random."""
    run = Simulation(Line(waiting_max=64, method=method), random.Random(seed))
    for number in range(workers):
        run.start(f"w{number}")
    turns = dict.fromkeys(range(AGENTS), 0)
    aboard: list[tuple[int, Flight]] = []
    while aboard or any(turn < TURNS for turn in turns.values()):
        idle = [a for a, turn in turns.items() if turn < TURNS and a not in {agent for agent, _ in aboard}]
        if idle and (not aboard or run.dice.random() < 0.6):
            agent = run.dice.choice(idle)
            aboard.append((agent, run.board(agent, turns[agent])))
            turns[agent] += 1
        else:
            run.end(aboard.pop(0)[1])
        run.line.clock.now += run.dice.random()
    return run


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 4]))
def test_with_affinity_far_more_of_the_prompts_is_stored_where_they_go(seed: int, workers: int) -> None:
    near, blind = simulated(seed, workers, "affinity"), simulated(seed, workers, "load")
    assert near.asked == blind.asked
    misses = 1 - near.cached / near.asked, 1 - blind.cached / blind.asked
    assert misses[0] <= misses[1]
    assert near.cached / near.asked > 0.8
    assert len(near.by_worker) >= workers // 2, "and they are not all sent to one"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 4]), st.integers(20, 60))
def test_a_flood_of_conversations_spreads_over_all_workers(seed: int, workers: int, flood: int) -> None:
    run = Simulation(Line(waiting_max=2 * flood), random.Random(seed))
    for number in range(workers):
        run.start(f"w{number}")
    for agent in range(flood):
        run.board(agent, run.dice.randint(0, 1))
    assert max(run.by_worker.values()) - min(run.by_worker.values()) <= 5


def test_one_ready_worker_among_loading_ones_gets_everything() -> None:
    run = Simulation(Line(), random.Random(1))
    run.start("w0")
    run.line.hello("w1")
    assert isinstance(run.line.dispatcher.find("m").ready, Ready)
    run.board(0, 0)
    assert run.by_worker == {"w0": 1}
