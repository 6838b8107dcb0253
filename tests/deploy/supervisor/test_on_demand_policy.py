"""Supervisor policy for children on demand and for swaps, without processes."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deploy.supervisor.children import ChildState, other_name
from deploy.supervisor.events import (
    ChildMessage,
    Decision,
    Died,
    Event,
    Idle,
    Kill,
    ModelsWanted,
    ReloadAsked,
    Reloaded,
    Report,
    Serving,
    Start,
    StopAsked,
    Terminate,
)
from deploy.supervisor.lifecycle import FAILED_S, LEAVE_S_MAX, Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy

STOP_S, DRAIN_S, READY_S = 15.0, 10.0, 600.0
SWAP = ReloadAsked("a", beside=True, swap=True)
SWAP_AFTER = ReloadAsked("a", beside=False, swap=True)


def lifecycle(*wanted: str, deaths_max: int = 10) -> Lifecycle:
    """Return the policy of a gateway and two workers on demand."""
    limits = RestartLimits(deaths_max=deaths_max)
    return Lifecycle(
        ["gateway", "a", "b"],
        RestartPolicy(limits),
        stop_timeout_s=STOP_S,
        now=0.0,
        drain_timeout_s=DRAIN_S,
        ready_timeout_s=READY_S,
        on_demand={name: RestartPolicy(limits) for name in ("a", "b")},
        wanted=wanted,
        loading=("a", "b"),
    )


def running(*events: Event) -> Lifecycle:
    """Return the policy with the first worker started, after these events."""
    children = lifecycle("a")
    children.handle(None, 0.0)
    for event in events:
        children.handle(event, 1.0)
    return children


def want(*names: str) -> ModelsWanted:
    return ModelsWanted(frozenset(names))


def deeds(decisions: Collection[Decision]) -> list[Decision]:
    return [decision for decision in decisions if not isinstance(decision, Report)]


def test_only_what_is_wanted_starts() -> None:
    children = lifecycle("a")
    assert children.handle(None, 0.0) == [Start("gateway"), Start("a")]
    assert (children.stage("a"), children.stage("b")) == ("running", "parked")
    assert children.wake_at() is None


def test_wanted_model_starts_and_unwanted_model_ends() -> None:
    children = running()
    assert deeds(children.handle(want("b"), 1.0)) == [Terminate("a"), Start("b")]
    assert children.stage("a") == "ending"
    assert children.wake_at() == 1.0 + STOP_S + DRAIN_S
    assert deeds(children.handle(Died("a", 1, 0), 2.0)) == []
    assert children.stage("a") == "parked"
    assert deeds(children.handle(want("a", "b"), 3.0)) == [Start("a")]


def test_ending_model_that_is_wanted_again_restarts_after_its_exit() -> None:
    children = running(want())
    assert deeds(children.handle(want("a"), 2.0)) == []
    assert deeds(children.handle(Died("a", 1, 0), 3.0)) == [Start("a")]


def test_crashed_model_is_not_restarted_if_unwanted() -> None:
    children = running(Died("a", 1, -9))
    assert children.stage("a") == "running"
    assert deeds(children.handle(want(), 1.1)) == []
    assert (children.stage("a"), children.wake_at()) == ("parked", None)


def test_unloadable_model_pauses_while_other_models_run() -> None:
    children = running()
    decisions = children.handle(Died("a", 1, 78), 1.0)
    assert deeds(decisions) == []
    assert "a restart cannot help" in str(decisions[0])
    assert (children.stage("a"), children.wake_at()) == ("failed", 1.0 + FAILED_S)
    assert deeds(children.handle(want("a", "b"), 2.0)) == [Start("b")]
    assert deeds(children.handle(None, 1.0 + FAILED_S)) == [Start("a")]
    assert children.status is None


def test_failure_of_a_start_is_reported_until_the_model_is_loaded() -> None:
    children = running()
    why = "org/model: Hugging Face has no such model."
    [report] = children.handle(Died("a", 1, 78, why), 1.0)
    assert isinstance(report, Report)
    assert why not in report.text, "the worker has logged the sentence already"
    ends = children.ends("a")
    assert (ends.count, ends.reason, ends.failure) == (1, "exit_78", why)
    assert why in ends.last
    children.handle(None, 1.0 + FAILED_S)
    assert children.ends("a").failure == why
    children.handle(ChildMessage("a", 2, "loaded"), 2.0 + FAILED_S)
    assert children.ends("a").failure == ""
    children.handle(Died("a", 2, -9), 3.0 + FAILED_S)
    assert children.ends("a").failure == "", "it had loaded"
    children.handle(None, 4.0 + FAILED_S)
    children.handle(Died("a", 3, -9), 5.0 + FAILED_S)
    assert "was killed by SIGKILL" in children.ends("a").failure


def test_crash_looping_model_fails_while_other_models_run() -> None:
    children = lifecycle("a", "b", deaths_max=1)
    children.handle(None, 0.0)
    children.handle(Died("b", 2, -9), 1.0)
    children.handle(Died("a", 1, -9), 1.0)
    children.handle(None, 2.0)
    children.handle(Died("a", 3, -9), 3.0)
    assert (children.stage("a"), children.stage("b")) == ("failed", "running")
    assert "a (pid 3) was killed by SIGKILL" in children.ends("a").failure
    assert children.status is None


def test_the_gateways_failure_still_stops_everything() -> None:
    children = running()
    assert deeds(children.handle(Died("gateway", 1, 78), 1.0)) == [Terminate("a")]
    children.handle(Died("a", 2, 0), 2.0)
    assert children.status == 78
    assert set(children.states().values()) == {ChildState.GONE}


def test_unwanted_model_ends_only_after_its_reload() -> None:
    children = running(ReloadAsked("a", beside=True))
    assert deeds(children.handle(want(), 2.0)) == []
    assert deeds(children.handle(Serving("a-2"), 3.0)) == [Terminate("a")]
    assert deeds(children.handle(Died("a", 1, 0), 4.0)) == [
        Reloaded(True, "a-2 has taken over from a"),
        Terminate("a-2"),
    ]
    children.handle(Died("a-2", 2, 0), 5.0)
    assert children.stage("a") == "parked"
    assert deeds(children.handle(want("a"), 6.0)) == [Start("a-2")]


def test_reload_of_a_stopped_model_starts_it() -> None:
    children = running(Died("a", 1, 78))
    done, start = deeds(children.handle(ReloadAsked("a", beside=True), 2.0))
    assert isinstance(done, Reloaded)
    assert done.done
    assert start == Start("a")


# --- swaps ---


def test_the_old_one_is_leaving_until_it_has_nothing_to_do() -> None:
    children = running(SWAP)
    assert children.leaving() == set()
    assert deeds(children.handle(Serving("a-2"), 2.0)) == []
    assert children.leaving() == {"a"}
    assert children.stage("a") == "running"
    assert deeds(children.handle(Idle("a-2"), 3.0)) == []
    assert deeds(children.handle(Idle("a"), 4.0)) == [Terminate("a")]
    assert children.leaving() == set()
    assert deeds(children.handle(Died("a", 1, 0), 5.0)) == [Reloaded(True, "a-2 has taken over from a")]


def test_leaving_model_is_terminated_after_the_timeout() -> None:
    children = running(SWAP, Serving("a-2"))
    assert children.wake_at() == 1.0 + LEAVE_S_MAX
    assert deeds(children.handle(None, 1.0 + LEAVE_S_MAX)) == [Terminate("a")]


def test_model_that_crashes_while_leaving_is_not_restarted() -> None:
    children = running(SWAP, Serving("a-2"))
    assert deeds(children.handle(Died("a", 1, -9), 2.0)) == [Reloaded(True, "a-2 has taken over from a")]
    assert children.states() == {
        "gateway": ChildState.RUNNING,
        "b": ChildState.PARKED,
        "a-2": ChildState.RUNNING,
    }


def test_without_room_the_old_one_ends_its_requests_first() -> None:
    children = running(SWAP_AFTER)
    assert children.leaving() == {"a"}
    assert deeds(children.handle(Serving("a"), 2.0)) == []
    assert deeds(children.handle(Idle("a"), 3.0)) == [Terminate("a")]
    assert deeds(children.handle(Died("a", 1, 0), 4.0)) == [Start("a")]
    assert deeds(children.handle(Serving("a"), 5.0)) == [Reloaded(True, "a was stopped and started again")]


def test_a_successor_that_fails_without_room_gives_its_place_back() -> None:
    children = running(SWAP_AFTER, Idle("a"), Died("a", 1, 0))
    failed, start = deeds(children.handle(Died("a", 2, 78), 5.0))
    assert isinstance(failed, Reloaded)
    assert not failed.done
    assert start == Start("a")


def test_replacement_not_ready_in_time_is_terminated_and_the_old_model_restarts() -> None:
    children = Lifecycle(
        ["gateway", "a"],
        RestartPolicy(RestartLimits()),
        stop_timeout_s=STOP_S,
        now=0.0,
        ready_timeout_s=READY_S,
    )
    for event in (None, SWAP_AFTER, Idle("a"), Died("a", 1, 0)):
        children.handle(event, 1.0)
    failed, end = deeds(children.handle(None, 1.0 + READY_S))
    assert isinstance(failed, Reloaded)
    assert end == Terminate("a")
    assert deeds(children.handle(Died("a", 2, 0), 700.0)) == [Start("a")]


class AnyHistory(RuleBasedStateMachine):
    """Stateful test: any order of wanted models, reloads, swaps and crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.alive: set[str] = set()
        self.killed: set[str] = set()
        self.wanted = {"a"}
        self.stopping = False
        self.asked = self.answered = 0
        self.children = lifecycle("a", deaths_max=3)

    @initialize()
    def begin(self) -> None:
        self.feed(None)

    def feed(self, event: Event | None) -> None:
        for decision in self.children.handle(event, self.now):
            match decision:
                case Start(name):
                    assert not self.stopping, "started during a stop"
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

    @rule(names=st.sets(st.sampled_from(["a", "b"])))
    def some_are_wanted(self, names: set[str]) -> None:
        self.wanted = names
        self.feed(want(*names))

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

    @precondition(lambda self: self.alive - {"gateway"})
    @rule(data=st.data(), kind=st.sampled_from([Serving, Idle]))
    def one_serves_or_is_idle(self, data: st.DataObject, kind: type[Serving] | type[Idle]) -> None:
        self.feed(kind(data.draw(st.sampled_from(sorted(self.alive - {"gateway"})))))

    @rule(child=st.sampled_from(["a", "b"]), beside=st.booleans(), swap=st.booleans())
    def a_reload_is_asked(self, child: str, beside: bool, swap: bool) -> None:
        name = child if child in self.children.states() else other_name(child)
        self.asked += 1
        self.feed(ReloadAsked(name, beside, swap))

    @precondition(lambda self: self.now > 1500)
    @rule()
    def stop_is_asked(self) -> None:
        self.feed(StopAsked("SIGTERM"))
        self.stopping = True

    @invariant()
    def everybody_is_answered_once(self) -> None:
        assert self.answered in (self.asked, self.asked - 1)

    @invariant()
    def it_knows_who_runs(self) -> None:
        states = self.children.states()
        alive = ChildState.RUNNING, ChildState.ENDING, ChildState.KILLED
        assert {name for name, state in states.items() if state in alive} <= self.alive
        assert {"gateway"} < states.keys()
        for child in ("a", "b"):
            assert states.keys() & {child, other_name(child)}
        assert self.children.leaving() <= self.alive

    @invariant()
    def what_is_wanted_is_on_its_way(self) -> None:
        if self.stopping or self.children.status is not None:
            return
        for child in self.wanted:
            stage = self.children.stage(child)
            assert stage != "parked" or self.children.wake_at() is not None or self.unsettled(child)

    def unsettled(self, child: str) -> bool:
        """Return whether a child without a wake-up time is started at the next tick."""
        self.feed(None)
        return self.children.stage(child) != "parked"

    def teardown(self) -> None:
        """Check that a stop completes from any state, by the passage of time alone."""
        self.feed(StopAsked("SIGTERM"))
        self.stopping = True
        for _ in range(20):
            if (due := self.children.wake_at()) is None:
                break
            self.now = max(self.now, due)
            self.feed(None)
        assert self.children.status is not None
        assert self.answered == self.asked


TestAnyHistory = AnyHistory.TestCase
