"""What the supervisor decides about the spare, without processes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deploy.supervisor.events import (
    Decision,
    Died,
    Event,
    Give,
    Kill,
    NotStarted,
    ReloadAsked,
    Reloaded,
    Report,
    Said,
    Serving,
    Start,
    StopAsked,
    Terminate,
    Wanted,
)
from deploy.supervisor.lifecycle import Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from deploy.supervisor.spares import SPARE, TAKE_S_MAX, Spares
from protocol.orders import Word

THERE = Said(SPARE, 9, "there")


def said(name: str, word: Word) -> Said:
    return Said(name, 1, word)


def lifecycle(limits: RestartLimits | None = None, *, on_demand: bool = False) -> Lifecycle:
    limits = limits or RestartLimits()
    workers = ["a", "b"] if on_demand else ["a"]
    return Lifecycle(
        ["gateway", *workers],
        RestartPolicy(limits),
        stop_timeout_s=15.0,
        now=0.0,
        loading=workers,
        on_demand={name: RestartPolicy(limits) for name in workers} if on_demand else None,
        wanted=["a"],
        spares=Spares(workers, RestartPolicy(limits)),
    )


def after(*events: Event, children: Lifecycle | None = None) -> Lifecycle:
    """One that has heard these, a tenth of a second from one to the next, from its start on."""
    children = children or lifecycle()
    for number, event in enumerate([None, *events]):
        children.handle(event, number / 10)
    return children


def deeds(decisions: list[Decision]) -> list[Decision]:
    return [decision for decision in decisions if not isinstance(decision, Report)]


def test_it_is_begun_once_the_worker_has_loaded_its_model_and_once_only() -> None:
    children = lifecycle()
    assert children.handle(None, 0.0) == [Start("gateway"), Start("a")]
    assert children.handle(None, 1.0) == []
    assert children.handle(said("a", "loaded"), 2.0) == [Start(SPARE)]
    assert children.handle(said("a", "loaded"), 3.0) == []
    assert deeds(children.handle(THERE, 4.0)) == []


def test_without_takers_there_is_none() -> None:
    limits = RestartLimits()
    children = Lifecycle(["a"], RestartPolicy(limits), stop_timeout_s=1.0, now=0.0, loading=["a"])
    assert children.handle(None, 0.0) == [Start("a")]
    assert children.handle(said("a", "loaded"), 2.0) == []


def test_a_worker_that_dies_after_a_good_life_is_at_once_what_the_spare_was() -> None:
    children = after(said("a", "loaded"), THERE)
    decisions = children.handle(Died("a", 1, -9), 60.0)
    assert deeds(decisions) == [Give("a")]
    assert "starts again at once" in str(decisions[0])


def test_the_next_one_is_begun_when_that_worker_has_loaded_and_not_before() -> None:
    children = after(said("a", "loaded"), THERE)
    children.handle(Died("a", 1, -9), 60.0)
    assert children.handle(said("a", "taken"), 60.1) == []
    assert children.handle(None, 70.0) == []
    assert children.handle(said("a", "loaded"), 71.0) == [Start(SPARE)]


def test_one_that_is_not_there_yet_is_given_to_nobody() -> None:
    children = after(said("a", "loaded"))
    assert deeds(children.handle(Died("a", 1, -9), 60.0)) == [Start("a")]
    # Nor is there a second one, when the worker has loaded.
    assert children.handle(said("a", "loaded"), 65.0) == []
    children.handle(THERE, 66.0)
    assert deeds(children.handle(Died("a", 2, -9), 90.0)) == [Give("a")]


def test_the_gateway_cannot_be_what_the_spare_is() -> None:
    children = after(said("a", "loaded"), THERE)
    assert deeds(children.handle(Died("gateway", 1, -9), 60.0)) == [Start("gateway")]


def test_one_that_dies_is_replaced_later_each_time() -> None:
    children = after(said("a", "loaded"))
    assert deeds(children.handle(Died(SPARE, 9, 1), 1.0)) == []
    assert children.wake_at() == pytest.approx(1.2)
    assert children.handle(None, 1.2) == [Start(SPARE)]
    children.handle(NotStarted(SPARE, "no such file"), 1.2)
    assert children.wake_at() == pytest.approx(1.6)
    assert children.handle(None, 1.6) == [Start(SPARE)]
    children.handle(THERE, 3.0)
    # After a good life, at once.
    assert deeds(children.handle(Died(SPARE, 9, -9), 60.0)) == [Start(SPARE)]


def test_one_that_cannot_be_kept_alive_is_given_up_and_the_worker_goes_on() -> None:
    children = after(said("a", "loaded"), children=lifecycle(RestartLimits(deaths_max=1)))
    children.handle(Died(SPARE, 9, 1), 1.0)
    assert children.handle(None, 1.2) == [Start(SPARE)]
    (line,) = children.handle(Died(SPARE, 9, 1), 1.3)
    assert "workers start without one" in str(line)
    assert children.wake_at() is None
    assert deeds(children.handle(Died("a", 1, -9), 60.0)) == [Start("a")]


def test_one_that_cannot_be_told_costs_no_more_than_the_old_way() -> None:
    children = after(said("a", "loaded"), THERE)
    children.handle(Died("a", 1, -9), 60.0)
    assert deeds(children.handle(NotStarted("a", "the spare cannot be told"), 60.0)) == [Start("a")]
    # Its own death is heard of later, and is nobody's.
    assert children.handle(Died(SPARE, 9, -9), 60.1) == []
    assert children.handle(said("a", "loaded"), 65.0) == [Start(SPARE)]


def test_one_that_dies_before_it_has_taken_what_it_was_told_is_started_in_the_old_way_at_once() -> None:
    children = after(said("a", "loaded"), THERE)
    children.handle(Died("a", 1, -9), 60.0)
    assert deeds(children.handle(Died("a", 9, -9), 60.1)) == [Start("a")]


def test_one_that_does_not_answer_is_killed_and_the_worker_started_in_the_old_way() -> None:
    children = after(said("a", "loaded"), THERE)
    children.handle(Died("a", 1, -9), 60.0)
    assert children.wake_at() == 60.0 + TAKE_S_MAX
    assert deeds(children.handle(None, 60.0 + TAKE_S_MAX)) == [Kill("a")]
    assert deeds(children.handle(Died("a", 9, -9), 62.1)) == [Start("a")]
    assert children.wake_at() is None


def test_who_has_taken_it_is_an_ordinary_worker() -> None:
    children = after(said("a", "loaded"), THERE)
    children.handle(Died("a", 1, -9), 60.0)
    children.handle(said("a", "taken"), 60.1)
    assert children.wake_at() is None
    decisions = children.handle(Died("a", 9, -9), 61.0)
    assert deeds(decisions) == []
    assert "starts again in 0.2 s" in str(decisions)


def test_a_reload_takes_it_and_a_broken_one_does_not_end_the_reload() -> None:
    children = after(said("a", "loaded"), THERE)
    assert deeds(children.handle(ReloadAsked("a", beside=True), 60.0)) == [Give("a-2")]
    assert deeds(children.handle(Died("a-2", 9, -9), 60.1)) == [Start("a-2")]
    assert children.handle(said("a-2", "loaded"), 65.0) == []  # the old one has still to end
    assert deeds(children.handle(Serving("a-2"), 65.1)) == [Terminate("a")]
    decisions = deeds(children.handle(Died("a", 1, 0), 66.0))
    assert decisions == [Reloaded(True, "a-2 has taken over from a"), Start(SPARE)]


def test_a_model_on_demand_takes_it() -> None:
    children = after(said("a", "loaded"), THERE, children=lifecycle(on_demand=True))
    assert deeds(children.handle(Wanted(frozenset("b")), 60.0)) == [Terminate("a"), Give("b")]
    assert children.handle(said("b", "loaded"), 61.0) == []
    assert deeds(children.handle(Died("a", 1, 0), 62.0)) == [Start(SPARE)]


def test_it_is_killed_when_everything_stops() -> None:
    children = after(said("a", "loaded"), THERE)
    assert deeds(children.handle(StopAsked("SIGTERM"), 60.0)) == [Kill(SPARE), Terminate("gateway")]
    assert deeds(children.handle(Died(SPARE, 9, -9), 60.1)) == []
    children.handle(Died("gateway", 2, 0), 61.0)
    children.handle(Died("a", 1, 0), 62.0)
    assert children.status == 0


class Kills(RuleBasedStateMachine):
    """A gateway, a worker and a spare, any of which may be killed at any time, and their world."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.pid = 0
        self.alive: dict[str, int] = {}
        limits = RestartLimits(deaths_max=10_000)
        self.children = lifecycle(limits)
        self.feed(None)

    def feed(self, event: Event | None) -> None:
        for decision in self.children.handle(event, self.now):
            match decision:
                case Start(name):
                    assert name not in self.alive
                    self.pid += 1
                    self.alive[name] = self.pid
                case Give(name):
                    assert name not in self.alive
                    self.alive[name] = self.alive.pop(SPARE)
                case Kill(name):
                    self.alive.pop(name)
                    self.feed(Died(name, 0, -9))

    @rule(pause_s=st.floats(0, 20))
    def time_passes(self, pause_s: float) -> None:
        until = self.now + pause_s
        while (at := self.children.wake_at()) is not None and at <= until:
            self.now = max(self.now, at)
            self.feed(None)
        self.now = until

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def one_is_killed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.feed(Died(name, self.alive.pop(name), -9))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), word=st.sampled_from(["there", "taken", "loaded"]))
    def one_says_something(self, data: st.DataObject, word: Word) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.feed(Said(name, self.alive[name], word))

    @invariant()
    def nothing_wakes_for_ever(self) -> None:
        if (at := self.children.wake_at()) is not None and at <= self.now:
            self.feed(None)
            later = self.children.wake_at()
            assert later is None or later > self.now

    def teardown(self) -> None:
        """Left alone, all of them run."""
        self.time_passes(20)
        for name in sorted(self.alive):
            self.feed(Said(name, self.alive[name], "taken"))
            self.feed(Said(name, self.alive[name], "loaded"))
        self.time_passes(20)
        assert sorted(self.alive) == ["a", "gateway", SPARE]


TestKills = Kills.TestCase
