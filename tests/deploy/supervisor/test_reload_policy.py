"""Supervisor policy for reloads, without processes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deploy.supervisor.children import KILL_WAIT_S_MAX, ChildState, other_name
from deploy.supervisor.events import (
    Decision,
    Died,
    Event,
    Kill,
    NotStarted,
    ReloadAsked,
    Reloaded,
    Report,
    Serving,
    Start,
    StopAsked,
    Terminate,
)
from deploy.supervisor.lifecycle import Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy

STOP_S, DRAIN_S, READY_S = 15.0, 10.0, 600.0
GATEWAY = ReloadAsked("gateway", beside=False)
BESIDE, AFTER = ReloadAsked("worker", beside=True), ReloadAsked("worker", beside=False)


def lifecycle(deaths_max: int = 10) -> Lifecycle:
    """Return the policy of a gateway and a worker."""
    return Lifecycle(
        ["gateway", "worker"],
        RestartPolicy(RestartLimits(deaths_max=deaths_max)),
        stop_timeout_s=STOP_S,
        now=0.0,
        drain_timeout_s=DRAIN_S,
        ready_timeout_s=READY_S,
    )


def running(*events: Event) -> Lifecycle:
    children = lifecycle()
    children.handle(None, 0.0)
    for event in events:
        children.handle(event, 1.0)
    return children


def deeds(decisions: list[Decision]) -> list[Decision]:
    return [decision for decision in decisions if not isinstance(decision, Report)]


def test_the_old_one_is_told_to_end_when_the_new_one_serves_and_not_before() -> None:
    children = running()
    assert deeds(children.handle(BESIDE, 1.0)) == [Start("worker-2")]
    assert deeds(children.handle(Serving("worker"), 2.0)) == []
    assert deeds(children.handle(Serving("worker-2"), 3.0)) == [Terminate("worker")]
    assert deeds(children.handle(Died("worker", 1, 0), 4.0)) == [
        Reloaded(True, "worker-2 has taken over from worker")
    ]
    assert deeds(children.handle(ReloadAsked("worker-2", beside=True), 5.0)) == [Start("worker")]


def test_a_gateway_has_the_time_to_drain_before_the_next_one_starts() -> None:
    children = running(GATEWAY)
    assert deeds(children.handle(None, 1.0 + DRAIN_S + STOP_S - 0.1)) == []
    assert deeds(children.handle(Died("gateway", 1, 0), 26.0)) == [Start("gateway")]
    assert deeds(children.handle(Serving("gateway"), 27.0)) == [
        Reloaded(True, "gateway was stopped and started again")
    ]


def test_without_room_the_old_one_ends_first() -> None:
    children = running()
    assert deeds(children.handle(AFTER, 1.0)) == [Terminate("worker")]
    assert deeds(children.handle(Serving("worker"), 1.5)) == []
    assert deeds(children.handle(Died("worker", 1, 0), 2.0)) == [Start("worker")]
    assert deeds(children.handle(Serving("worker"), 3.0)) == [
        Reloaded(True, "worker was stopped and started again")
    ]


def test_a_successor_that_dies_counts_as_no_death_and_changes_nothing() -> None:
    for death in (Died("worker-2", 2, 78), NotStarted("worker-2", "no such file")):
        children = running(BESIDE)
        (failed,) = deeds(children.handle(death, 2.0))
        assert isinstance(failed, Reloaded)
        assert not failed.done
        assert children.states() == {"gateway": ChildState.RUNNING, "worker": ChildState.RUNNING}
        assert children.wake_at() is None


def test_a_successor_that_takes_too_long_is_told_to_end() -> None:
    children = running(BESIDE)
    assert children.wake_at() == 1.0 + READY_S
    failed, told = deeds(children.handle(None, 1.0 + READY_S))
    assert failed == Reloaded(False, "worker-2 was not ready within 600 s")
    assert told == Terminate("worker-2")
    assert deeds(children.handle(BESIDE, 602.0)) == [Reloaded(False, "a reload is already in progress")]
    assert deeds(children.handle(Died("worker-2", 2, 0), 603.0)) == []
    assert deeds(children.handle(BESIDE, 604.0)) == [Start("worker-2")]


def test_the_old_one_gets_time_for_its_requests_and_is_then_killed() -> None:
    children = running(BESIDE, Serving("worker-2"))
    assert children.wake_at() == 1.0 + STOP_S + DRAIN_S
    assert deeds(children.handle(None, 1.0 + STOP_S + DRAIN_S)) == [Kill("worker")]
    (done,) = deeds(children.handle(None, 1.0 + STOP_S + DRAIN_S + KILL_WAIT_S_MAX))
    assert isinstance(done, Reloaded)
    assert deeds(children.handle(Died("worker", 1, -9), 100.0)) == []


def test_the_new_one_takes_over_from_one_that_has_died_meanwhile() -> None:
    children = running(BESIDE, Died("worker", 1, -9))
    assert deeds(children.handle(Serving("worker-2"), 1.1)) == [
        Reloaded(True, "worker-2 has taken over from worker")
    ]
    assert children.states() == {"gateway": ChildState.RUNNING, "worker-2": ChildState.RUNNING}


def test_the_new_one_that_dies_once_it_served_is_started_again() -> None:
    children = running(BESIDE, Serving("worker-2"))
    assert deeds(children.handle(Died("worker-2", 2, -9), 2.0)) == []
    assert deeds(children.handle(None, 2.5)) == [Start("worker-2")]


def test_stopped_worker_is_not_reloaded() -> None:
    (refused,) = deeds(running(Died("worker", 1, -9)).handle(BESIDE, 1.0))
    assert isinstance(refused, Reloaded)
    assert not refused.done


class AnyHistory(RuleBasedStateMachine):
    """Stateful test: any events in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.alive: set[str] = set()
        self.killed: set[str] = set()
        self.stopping = False
        self.asked = self.answered = 0
        self.children = lifecycle(deaths_max=4)

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
                case Terminate(name):
                    assert name in self.alive
                case Kill(name):
                    assert name in self.alive
                    self.killed.add(name)
                case Reloaded():
                    self.answered += 1
                case Report():
                    pass

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), returncode=st.sampled_from([0, 78, -9]), passed_s=st.floats(0, 100))
    def one_dies(self, data: st.DataObject, returncode: int, passed_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.now += passed_s
        self.alive.discard(name)
        self.feed(Died(name, 1, returncode))

    @rule(passed_s=st.floats(0, 700))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s
        self.feed(None)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def one_serves(self, data: st.DataObject) -> None:
        self.feed(Serving(data.draw(st.sampled_from(sorted(self.alive)))))

    @rule(beside=st.booleans())
    def a_reload_is_asked(self, beside: bool) -> None:
        name = "worker" if "worker" in self.children.states() else other_name("worker")
        self.asked += 1
        self.feed(ReloadAsked(name, beside))

    @rule()
    def a_reload_of_the_gateway_is_asked(self) -> None:
        self.asked += 1
        self.feed(GATEWAY)

    @rule()
    def stop_is_asked(self) -> None:
        self.feed(StopAsked("SIGTERM"))
        self.stopping = True

    @invariant()
    def everybody_is_answered_once(self) -> None:
        assert self.answered in (self.asked, self.asked - 1)
        if self.children.status is not None:
            assert self.answered == self.asked

    @invariant()
    def it_knows_who_runs(self) -> None:
        states = self.children.states()
        held = {name for name, state in states.items() if state not in (ChildState.WAITING, ChildState.GONE)}
        assert held <= self.alive
        assert len(states) <= 4

    @invariant()
    def nobody_is_left_without_a_way_on(self) -> None:
        assert self.children.status is not None or self.alive or self.children.wake_at() is not None


TestAnyHistory = AnyHistory.TestCase
