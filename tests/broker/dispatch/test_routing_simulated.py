"""Simulation of agents' conversations with workers that cache prompts, turn by turn."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dispatch.flight import Flight
from broker.dispatch.prefix_hashes import prefix_hashes
from protocol.types import RoutingMethod
from tests.broker.dispatcher_line import Line
from tests.factories import accepted, events, finished, request

AGENTS, TURNS = 8, 10
SYSTEM = "You are one of many agents. " * 60


@dataclass
class Simulation:
    """Simulation state: `stored` hashes of each worker, bytes `asked` and `cached` of all prompts."""

    line: Line
    dice: random.Random
    stored: dict[str, set[bytes]] = field(default_factory=dict)
    asked: int = 0
    cached: int = 0
    by_worker: Counter[str] = field(default_factory=Counter)

    def start(self, name: str) -> None:
        self.stored[name] = set()
        self.line.serving(name, rows=16)

    def submit(self, agent: int, turn: int) -> Flight:
        said = [{"role": "user", "content": f"{agent} says {number}. " * 20} for number in range(turn + 1)]
        messages = [{"role": "system", "content": SYSTEM}, *said]
        flight = self.line.submit(request(f"{agent}.{turn}", messages=messages, max_tokens=64))
        assert flight.attempt is not None
        self._run(flight, flight.attempt.worker)
        return flight

    def _run(self, flight: Flight, worker: str) -> None:
        prompt = prefix_hashes(flight.request)
        known = [size for mark, size in prompt.hashes if mark in self.stored[worker]]
        self.asked += prompt.size
        self.cached += max(known, default=0)
        self.stored[worker] |= {mark for mark, _ in prompt.hashes}
        self.by_worker[worker] += 1

    def end(self, flight: Flight) -> None:
        attempt = flight.attempt
        assert attempt is not None
        worker, id = attempt.worker, attempt.id
        self.line.say(worker, accepted(worker, id), events(worker, id, "x"), finished(worker, id, 1))
        context = self.line.contexts.pop(0)
        context.__exit__(None, None, None)


def simulated(seed: int, workers: int, method: RoutingMethod) -> Simulation:
    """Run agents that ask again after each answer, with a random number of requests in flight."""
    run = Simulation(Line(waiting_max=64, method=method), random.Random(seed))
    for number in range(workers):
        run.start(f"w{number}")
    turns = dict.fromkeys(range(AGENTS), 0)
    assigned: list[tuple[int, Flight]] = []
    while assigned or any(turn < TURNS for turn in turns.values()):
        idle = [a for a, turn in turns.items() if turn < TURNS and a not in {agent for agent, _ in assigned}]
        if idle and (not assigned or run.dice.random() < 0.6):
            agent = run.dice.choice(idle)
            assigned.append((agent, run.submit(agent, turns[agent])))
            turns[agent] += 1
        else:
            run.end(assigned.pop(0)[1])
        run.line.clock.now += run.dice.random()
    return run


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 4]))
def test_with_affinity_far_more_of_the_prompts_is_stored_where_they_go(seed: int, workers: int) -> None:
    near, blind = simulated(seed, workers, "affinity"), simulated(seed, workers, "load")
    assert near.asked == blind.asked
    misses = 1 - near.cached / near.asked, 1 - blind.cached / blind.asked
    assert misses[0] <= misses[1]
    assert near.cached / near.asked > 0.8
    assert len(near.by_worker) >= workers // 2, "too few workers were used"
