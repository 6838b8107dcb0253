"""Helpers for tests of the supervisor's policy: expected decisions, and random histories."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deploy.supervisor.children import ChildState
from deploy.supervisor.events import (
    AssignSpare,
    Decision,
    Died,
    Event,
    Kill,
    Reloaded,
    Report,
    Start,
    StopAsked,
    Terminate,
)
from deploy.supervisor.lifecycle import Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from deploy.supervisor.spares import SPARE

HISTORIES = settings(max_examples=40)
STOP_S = 15.0
RUNNING_STATES = (ChildState.RUNNING, ChildState.ENDING, ChildState.KILLED)


@dataclass(frozen=True)
class Answer:
    """Equal to every answer to a reload with this outcome, whatever its words."""

    done: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reloaded) and other.done == self.done


DONE, REFUSED = Answer(True), Answer(False)


def lifecycle(children: Sequence[str], limits: RestartLimits | None = None, **options: Any) -> Lifecycle:
    policy = RestartPolicy(limits or RestartLimits())
    return Lifecycle(children, policy, stop_timeout_s=STOP_S, now=0.0, **options)


def deeds(decisions: Collection[Decision]) -> list[Decision]:
    return [decision for decision in decisions if not isinstance(decision, Report)]


def reports(decisions: Collection[Decision]) -> list[Report]:
    return [decision for decision in decisions if isinstance(decision, Report)]


def follow(children: Lifecycle, *steps: tuple[Event | None, float, list[Decision | Answer]]) -> Lifecycle:
    """Feed events at their times, and assert what is done after each; return `children`."""
    for event, now, expected in steps:
        found = deeds(children.handle(event, now))
        assert found == expected, (event, now)
    return children


def after(children: Lifecycle, *events: Event | None, now: float = 1.0) -> Lifecycle:
    """Start everything at 0, feed the events at `now`, and return `children`."""
    children.handle(None, 0.0)
    for event in events:
        children.handle(event, now)
    return children


class History(RuleBasedStateMachine):
    """Stateful test of deaths, time and a stop in any order. Subclasses add what can be asked for."""

    statuses: ClassVar[Sequence[int]] = (0, 78, -9)
    children: Lifecycle

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.alive: set[str] = set()
        self.killed: set[str] = set()
        self.stopping = False
        self.asked = self.answered = 0
        self.children = self.lifecycle()

    def lifecycle(self) -> Lifecycle:
        raise NotImplementedError

    def check(self, decision: Terminate | Kill) -> None:
        """Assert what must hold for the end of a child that is alive."""

    @initialize()
    def begin(self) -> None:
        self.feed(None)

    def feed(self, event: Event | None) -> None:
        for decision in self.children.handle(event, self.now):
            match decision:
                case Start(name):
                    assert not self.stopping, "started during a stop"
                    # A process that survives SIGKILL is abandoned, and its end is not reported any more.
                    assert name not in self.alive or name in self.killed, "started twice"
                    self.alive.add(name)
                    self.killed.discard(name)
                case AssignSpare(name):
                    assert name not in self.alive
                    self.alive = self.alive - {SPARE} | {name}
                case Terminate(name) | Kill(name):
                    assert name in self.alive
                    self.check(decision)
                    if isinstance(decision, Kill):
                        self.killed.add(name)
                case Reloaded():
                    self.answered += 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), passed_s=st.floats(0, 100))
    def one_dies(self, data: st.DataObject, passed_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        status = data.draw(st.sampled_from(self.statuses))
        self.now += passed_s
        self.alive.discard(name)
        self.feed(Died(name, 1, status))

    @rule(passed_s=st.floats(0, 700))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s
        self.feed(None)

    def stop(self) -> None:
        self.stopping = True
        self.feed(StopAsked("SIGTERM"))

    @invariant()
    def everybody_is_answered_once(self) -> None:
        assert self.answered in (self.asked, self.asked - 1)
        if self.children.status is not None:
            assert self.answered == self.asked

    @invariant()
    def it_knows_who_runs(self) -> None:
        states = self.children.states()
        assert {name for name, state in states.items() if state in RUNNING_STATES} <= self.alive
        assert self.children.leaving() <= self.alive

    @invariant()
    def nobody_is_left_without_a_way_on(self) -> None:
        assert self.children.status is not None or self.alive or self.children.wake_at() is not None

    def teardown(self) -> None:
        """Check that a stop completes from any state, by the passage of time alone."""
        self.stop()
        for _ in range(20):
            if (due := self.children.wake_at()) is None:
                break
            self.now = max(self.now, due)
            self.feed(None)
        assert self.children.status is not None
        assert self.answered == self.asked
