"""Supervisor policy for children on demand and for swaps, without processes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from deploy.supervisor.children import ChildState, other_name
from deploy.supervisor.events import (
    ChildMessage,
    Died,
    Event,
    Idle,
    ModelsWanted,
    ReloadAsked,
    Reloaded,
    Report,
    Serving,
    Start,
    Terminate,
)
from deploy.supervisor.lifecycle import FAILED_S, Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from tests.deploy.supervisor import policies
from tests.deploy.supervisor.policies import DONE, HISTORIES, REFUSED, STOP_S, History, after, follow

DRAIN_S = 10.0
SWAP = ReloadAsked("a", beside=True, swap=True)
SWAP_AFTER = ReloadAsked("a", beside=False, swap=True)
TAKEN_OVER = Reloaded(True, "a-2 has taken over from a")


def lifecycle(*wanted: str, deaths_max: int = 10) -> Lifecycle:
    limits = RestartLimits(deaths_max=deaths_max)
    options = {"drain_timeout_s": DRAIN_S, "ready_timeout_s": 600.0, "loading": ("a", "b"), "wanted": wanted}
    on_demand = {name: RestartPolicy(limits) for name in ("a", "b")}
    return policies.lifecycle(["gateway", "a", "b"], limits, on_demand=on_demand, **options)


def running(*events: Event) -> Lifecycle:
    """Return the policy with the first worker started, after these events."""
    return after(lifecycle("a"), *events)


def want(*names: str) -> ModelsWanted:
    return ModelsWanted(frozenset(names))


def test_only_what_is_wanted_starts_and_ends_when_it_is_not() -> None:
    children = follow(lifecycle("a"), (None, 0.0, [Start("gateway"), Start("a")]))
    assert (children.stage("a"), children.stage("b"), children.wake_at()) == ("running", "parked", None)
    follow(children, (want("b"), 1.0, [Terminate("a"), Start("b")]))
    assert (children.stage("a"), children.wake_at()) == ("ending", 1.0 + STOP_S + DRAIN_S)
    follow(children, (Died("a", 1, 0), 2.0, []))
    assert children.stage("a") == "parked"
    follow(children, (want("a", "b"), 3.0, [Start("a")]))


def test_unloadable_model_pauses_while_other_models_run() -> None:
    children = running()
    [report] = children.handle(Died("a", 1, 78), 1.0)
    assert "a restart cannot help" in str(report)
    assert (children.stage("a"), children.wake_at()) == ("failed", 1.0 + FAILED_S)
    follow(children, (want("a", "b"), 2.0, [Start("b")]), (None, 1.0 + FAILED_S, [Start("a")]))
    assert children.status is None
    follow(running(Died("a", 1, 78)), (ReloadAsked("a", beside=True), 2.0, [DONE, Start("a")]))


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


def test_the_gateways_failure_still_stops_everything() -> None:
    children = follow(running(), (Died("gateway", 1, 78), 1.0, [Terminate("a")]), (Died("a", 2, 0), 2.0, []))
    assert children.status == 78
    assert set(children.states().values()) == {ChildState.GONE}


def test_the_old_one_is_leaving_until_it_has_nothing_to_do() -> None:
    children = running(SWAP)
    assert children.leaving() == set()
    follow(children, (Serving("a-2"), 2.0, []))
    assert (children.leaving(), children.stage("a")) == ({"a"}, "running")
    follow(children, (Idle("a-2"), 3.0, []), (Idle("a"), 4.0, [Terminate("a")]))
    assert children.leaving() == set()
    follow(children, (Died("a", 1, 0), 5.0, [TAKEN_OVER]))


def test_a_successor_without_room_that_fails_gives_its_place_back() -> None:
    swapped = running(SWAP_AFTER, Idle("a"), Died("a", 1, 0))
    follow(swapped, (Died("a", 2, 78), 5.0, [REFUSED, Start("a")]))


class AnyHistory(History):
    def __init__(self) -> None:
        super().__init__()
        self.wanted = {"a"}

    def lifecycle(self) -> Lifecycle:
        return lifecycle("a", deaths_max=3)

    @rule(names=st.sets(st.sampled_from(["a", "b"])))
    def some_are_wanted(self, names: set[str]) -> None:
        self.wanted = names
        self.feed(want(*names))

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
        self.stop()

    @invariant()
    def each_child_has_a_place(self) -> None:
        states = self.children.states()
        assert {"gateway"} < states.keys()
        for child in ("a", "b"):
            assert states.keys() & {child, other_name(child)}

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


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = HISTORIES
