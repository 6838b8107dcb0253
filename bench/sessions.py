"""Simulated sessions of agents: what the order of requests and of evictions does to them, without a model.

    python -m bench.sessions [--agents 2,4,8,16] [--memory 1,2,4,8] [--machines small,large] [--share 0.25,1]

Scheduler, prefix index and prefix store are the worker's own; the engine is a cost model (`bench.schedules`).
Each agent makes tens of turns, whose prompts repeat the one before and add to it, with tools that run between
them, and some have sub-agents, for which they wait. Memory is given in sessions: a session at its end fills
one; prefixes take at most a share of it. Requests name their sessions, or do not: then none is held for
another. Times are simulated, so the load of this machine does not matter.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from bench.schedules import MACHINES, ROWS_MAX, Machine
from protocol.types import PrefixReuse
from tests.factories import engine_request
from worker.core.prefix.index import PrefixIndex
from worker.core.prefix.store import PrefixStore
from worker.core.rows import Group, Row
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.interfaces import Engine
from worker.values import CacheSlice, CacheSpec

SCALE = 8
"""Tokens that a simulated token stands for."""
TOKEN_BYTES = 100_000 * SCALE
"""Cache of a simulated token."""
TURNS = (20, 43, 90)
"""Turns of a session: bounds and median, of vLLM's trace of agents."""
OPENING = (15_000 // SCALE, 20_000 // SCALE)
"""Tokens of a first prompt, of which `COMMON` are those of every session: system prompt and tools."""
COMMON = 10_000 // SCALE
ADDED = (200 / SCALE, 3_000 / SCALE)
"""Tokens that a turn adds, small ones more often."""
ANSWER = (100 // SCALE, 400 // SCALE)
SOON, SOON_S, LATE_S = 0.86, (0.05, 1.0), (1.0, 240.0)
"""Share of tools that return within a second, and the bounds of both kinds in seconds."""
BRANCHES, BRANCH_TURNS, BRANCH_OPENING = 0.03, (4, 12), (6_000 // SCALE, 10_000 // SCALE)
"""Share of turns that start a sub-agent, its turns and its first prompt."""
ARRIVALS_S = 60.0
"""Seconds within which all sessions begin."""

_numbers = itertools.count(1)


def fresh(count: int) -> tuple[int, ...]:
    """Return tokens that occur nowhere else."""
    first = next(_numbers) << 20
    return tuple(range(first, first + count))


SYSTEM = fresh(COMMON)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: the tokens that it adds, those of its answer, and the seconds until the tools have run.
    `branch`: the sub-agent that runs in their place."""

    added: int
    answer: int
    gap_s: float
    branch: Trace | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """What one session asks."""

    opening: int
    common: int
    turns: Sequence[Turn]

    @property
    def length(self) -> int:
        """Tokens at its end."""
        return self.opening + sum(turn.added + turn.answer for turn in self.turns)


def _log_uniform(chance: random.Random, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return low * (high / low) ** chance.random()


def _turns(chance: random.Random, count: int, branches: float) -> Iterator[Turn]:
    for number in range(count):
        gap_s = _log_uniform(chance, SOON_S if chance.random() < SOON else LATE_S)
        branch = None
        if chance.random() < branches and number < count - 1:
            turns = tuple(_turns(chance, chance.randint(*BRANCH_TURNS), 0.0))
            branch = Trace(chance.randint(*BRANCH_OPENING), 0, turns)
        added = round(_log_uniform(chance, ADDED)) if number else 0
        yield Turn(added, chance.randint(*ANSWER), gap_s, branch)


def trace(chance: random.Random) -> Trace:
    """Return a random session of an agent."""
    low, median, high = TURNS
    count = round(min(high, max(low, chance.lognormvariate(0, 0.4) * median)))
    return Trace(chance.randint(*OPENING), COMMON, tuple(_turns(chance, count, BRANCHES)))


@dataclass(eq=False, slots=True)
class Session:
    """A session that runs. `done`: called at its end."""

    name: str
    trace: Trace
    prompt: tuple[int, ...]
    done: Callable[[float], None]
    parent: str = ""
    number: int = 0
    asked_at: float = 0.0


class Copies:
    """The part of the engine that the prefix store needs: a token takes one byte."""

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        return [CacheSlice((), (last - first) * TOKEN_BYTES, first) for first, last in runs], None

    def restore(self, row: str, pieces: object, states: object) -> None:
        """Nothing is copied."""


@dataclass
class Figures:
    """`done_s`: seconds from a session's first request to its last answer, sub-agents not counted; `first_s`:
    the longest wait for a first token; `peak`: most memory, as a share of what there is."""

    done_s: list[float] = field(default_factory=list)
    first_s: float = 0.0
    prompts: int = 0
    reused: int = 0
    peak: float = 0.0

    @property
    def cached(self) -> float:
        """Share of prompt tokens that were reused."""
        return self.reused / max(1, self.prompts)


class Simulation:
    """Sessions on one machine with memory for `bytes_max` tokens, of which prefixes take at most `share`."""

    def __init__(self, machine: Machine, bytes_max: int, *, share: float, named: bool) -> None:
        self.machine, self.named, self.now = machine, named, 0.0
        self.bytes_max = bytes_max
        index = PrefixIndex(CacheSpec())
        config = SchedulerConfig(
            rows_max=ROWS_MAX,
            bytes_max=bytes_max,
            row_bytes=lambda tokens: tokens * TOKEN_BYTES,
            inter_token_target_s=0.1 * SCALE,
            inter_token_s_max=SCALE,
        )
        self.scheduler = Scheduler(config, index)
        self.store = PrefixStore(cast(Engine, Copies()), index, int(share * bytes_max), lambda command: None)
        self.store.spare = partial(self.scheduler.reservations.spare, 0)
        self.figures = Figures()
        self.sessions: dict[str, Session] = {}
        self._coming: list[tuple[float, int, Session]] = []
        self._ids = itertools.count()

    def run(self, traces: Sequence[Trace], chance: random.Random) -> Figures:
        """Run all sessions to their ends."""
        for trace in traces:
            began = chance.uniform(0, ARRIVALS_S)
            self._begin(trace, began, partial(self._complete, began))
        while self._coming or len(self.scheduler):
            if not len(self.scheduler):
                self.now = max(self.now, self._coming[0][0])
            while self._coming and self._coming[0][0] <= self.now:
                self._ask(heapq.heappop(self._coming)[2])
            self._step()
        return self.figures

    def _complete(self, began: float, now: float) -> None:
        self.figures.done_s.append(now - began)

    def _begin(self, trace: Trace, at: float, done: Callable[[float], None], parent: str = "") -> None:
        prompt = (*SYSTEM[: trace.common], *fresh(trace.opening - trace.common))
        self._await(Session(f"s{next(self._ids)}", trace, prompt, done, parent), at)

    def _await(self, session: Session, at: float) -> None:
        heapq.heappush(self._coming, (at, next(self._ids), session))

    def _ask(self, session: Session) -> None:
        turn = session.trace.turns[session.number]
        session.prompt = (*session.prompt, *fresh(turn.added))
        id = f"{session.name}.{session.number}"
        session.asked_at = self.now
        self.sessions[id] = session
        request = engine_request(
            id,
            session.prompt,
            max_tokens=turn.answer,
            boundaries=(len(session.prompt) - 4,),
            session=session.name if self.named else "",
            parent_session=session.parent if self.named else "",
        )
        self.scheduler.add(request, self.now)

    def _step(self) -> None:
        before = self.now
        if decodes := self.scheduler.decodes:
            self._decode()
        else:
            self.scheduler.on_step_end(self.now, decoded=None)
        used = TOKEN_BYTES * sum(row.length for row in self.scheduler if row.bytes)
        plan = self.scheduler.plan(used)
        self.store.fit(self.scheduler.reservations.spare(used), plan.groups, self.scheduler.decoding)
        held = self.store.index.ram_bytes + self.scheduler.reservations.reserved
        self.figures.peak = max(self.figures.peak, held / self.bytes_max)
        for group in plan.groups:
            self._prefill(group)
        if not decodes:
            self.scheduler.on_step_end(self.now, decoded=False)
        if self.now == before:  # nothing can run before the next request comes
            self.now = max(
                self.now + 0.05, min(self._coming[0][0], self.now + 1) if self._coming else self.now + 1
            )

    def _decode(self) -> None:
        rows = self.scheduler.decoding
        self.now += self.machine.decode_s(len(rows))
        self.scheduler.on_step_end(self.now, decoded=True)
        for row in rows:
            self._emit(row)

    def _emit(self, row: Row) -> None:
        self.scheduler.answered(row, 7)
        if len(row.answered) >= row.request.max_tokens:
            self.scheduler.drop(row.id)
            self.store.drop(row)
            self.store.store_ended_row(row)
            self._end_turn(self.sessions.pop(row.id), row)

    def _end_turn(self, session: Session, row: Row) -> None:
        turn = session.trace.turns[session.number]
        session.prompt = (*session.prompt, *row.answered)
        session.number += 1
        if session.number == len(session.trace.turns):
            session.done(self.now)
        elif turn.branch is None:
            self._await(session, self.now + turn.gap_s)
        else:
            self._begin(turn.branch, self.now, lambda now: self._await(session, now), session.name)

    def _prefill(self, group: Group) -> None:
        for chunk in group:
            if chunk.match is not None and not self.store.restore(chunk.row, chunk.match):
                return
            if chunk.row.reuse is None:
                self._count(chunk.row, chunk.match.length if chunk.match else 0)
        if width := max(len(chunk.tokens) for chunk in group):
            self.now += self.machine.prefill_s(width, group[0].begin, len(group))
        self.scheduler.ran(group)
        for chunk in group:
            self.store.keep(chunk.row, done=chunk.last)
            if chunk.last:
                for row in (*chunk.copies, chunk.row):
                    self.scheduler.started(row, sampled=1)
                    session = self.sessions[row.id]
                    if not row.answered:
                        self.figures.first_s = max(self.figures.first_s, self.now - session.asked_at)
                    self._emit(row)

    def _count(self, row: Row, reused: int) -> None:
        row.reuse = PrefixReuse(tokens=reused)
        self.figures.prompts += len(row.tokens)
        self.figures.reused += reused


def scaled(machine: Machine) -> Machine:
    """Return a machine in simulated tokens."""
    return replace(
        machine,
        decode=machine.decode * SCALE,
        row=machine.row * SCALE,
        token=machine.token * SCALE,
        reach=machine.reach * SCALE**2,
    )


def measure(machine: Machine, agents: int, memory: float, *, share: float, named: bool, seed: int) -> Figures:
    """Run `agents` random sessions on memory for `memory` of them, and for the longest alone."""
    chance = random.Random(seed)
    traces = [trace(chance) for _ in range(agents)]
    unit = statistics.mean(each.length for each in traces)
    longest = max(each.length for each in traces)
    bytes_max = TOKEN_BYTES * max(int(memory * unit), longest + 100)
    return Simulation(machine, bytes_max, share=share, named=named).run(traces, chance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default="2,4,8,16")
    parser.add_argument("--memory", default="1,2,4,8")
    parser.add_argument("--machines", default="small")
    parser.add_argument("--share", default="0.25,1")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    cases = itertools.product(
        (scaled(machine) for machine in MACHINES if machine.name in asked.machines.split(",")),
        map(int, asked.agents.split(",")),
        map(float, asked.memory.split(",")),
        map(float, asked.share.split(",")),
        (False, True),
    )
    print("machine  agents  memory  share  named     mean, s  first, s  cached  peak")
    for machine, agents, memory, share, named in cases:
        if memory <= agents:
            found = measure(machine, agents, memory, share=share, named=named, seed=asked.seed)
            print(
                f"{machine.name:8} {agents:6} {memory:7g} {share:6g}  {named!s:5} "
                f"{statistics.mean(found.done_s):11.0f} {found.first_s:9.0f} {found.cached:7.3f} "
                f"{found.peak:5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
