"""Supervisor policy for the spare, without processes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from deploy.supervisor.events import (
    AssignSpare,
    ChildMessage,
    Died,
    Event,
    Kill,
    NotStarted,
    ReloadAsked,
    Reloaded,
    Serving,
    Start,
    StopAsked,
    Terminate,
    WorkersIdle,
)
from deploy.supervisor.lifecycle import Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from deploy.supervisor.spares import SPARE, TAKE_S_MAX, THERE_S_MAX, Spares
from protocol.supervisor_messages import Word
from tests.deploy.supervisor import policies
from tests.deploy.supervisor.policies import HISTORIES, History, deeds, follow

LIMITS = RestartLimits()
IDLE = WorkersIdle()
READY = ChildMessage(SPARE, 9, "there")


def said(name: str, word: Word) -> ChildMessage:
    return ChildMessage(name, 1, word)


def lifecycle(limits: RestartLimits = LIMITS) -> Lifecycle:
    spares = Spares(["a"], RestartPolicy(limits))
    return policies.lifecycle(["gateway", "a"], limits, loading=["a"], spares=spares)


def after(*events: Event) -> Lifecycle:
    """Return the policy after its start and these events, 0.1 s apart."""
    children = lifecycle()
    for number, event in enumerate([None, *events]):
        children.handle(event, number / 10)
    return children


def ready() -> Lifecycle:
    """Return the policy with a worker that has loaded its model, and a spare that is ready."""
    return after(said("a", "loaded"), IDLE, READY)


def test_it_is_begun_once_the_worker_has_loaded_its_model_and_is_idle_and_once_only() -> None:
    children = lifecycle()
    assert children.handle(None, 0.0) == [Start("gateway"), Start("a")]
    assert children.handle(IDLE, 1.0) == []
    assert not children.waits_for_idle
    assert children.handle(said("a", "loaded"), 2.0) == []
    assert children.waits_for_idle
    assert children.handle(None, 2.5) == []
    assert children.handle(IDLE, 3.0) == [Start(SPARE)]
    assert not children.waits_for_idle
    assert children.handle(IDLE, 3.5) == []
    assert deeds(children.handle(READY, 4.0)) == []


def test_a_worker_that_dies_after_a_good_life_is_at_once_what_the_spare_was() -> None:
    children = ready()
    decisions = children.handle(Died("a", 1, -9), 60.0)
    assert deeds(decisions) == [AssignSpare("a")]
    assert "restarting at once" in str(decisions[0])
    follow(
        children,  # the next one is begun when that worker has loaded, and not before
        (said("a", "taken"), 60.1, []),
        (IDLE, 70.0, []),
        (said("a", "loaded"), 71.0, []),
        (IDLE, 72.0, [Start(SPARE)]),
    )


def test_spare_not_ready_in_time_is_killed_and_replaced() -> None:
    children = after(said("a", "loaded"), IDLE)
    assert children.wake_at() == pytest.approx(0.2 + THERE_S_MAX)
    follow(children, (None, 1.0 + THERE_S_MAX, [Kill(SPARE)]))
    assert children.wake_at() is None
    follow(
        children,
        (Died(SPARE, 9, -9), 2.0 + THERE_S_MAX, []),
        (IDLE, 3.0 + THERE_S_MAX, [Start(SPARE)]),
        (READY, 4.0 + THERE_S_MAX, []),
    )
    assert children.wake_at() is None


def test_crashed_spare_is_replaced_with_backoff_and_at_once_after_a_long_run() -> None:
    children = follow(after(said("a", "loaded"), IDLE), (Died(SPARE, 9, 1), 1.0, []))
    assert children.wake_at() == pytest.approx(1.2)
    follow(children, (IDLE, 1.2, [Start(SPARE)]), (NotStarted(SPARE, "no such file"), 1.2, []))
    assert children.wake_at() == pytest.approx(1.6)
    follow(
        children,
        (IDLE, 1.6, [Start(SPARE)]),
        (READY, 3.0, []),
        (Died(SPARE, 9, -9), 60.0, []),
        (IDLE, 60.1, [Start(SPARE)]),
    )


def test_spare_that_cannot_be_reached_or_dies_or_hangs_falls_back_to_a_normal_start() -> None:
    taken = (Died("a", 1, -9), 60.0, [AssignSpare("a")])
    follow(
        ready(),
        taken,
        (NotStarted("a", "the spare cannot be reached"), 60.0, [Start("a")]),
        (Died(SPARE, 9, -9), 60.1, []),
        (said("a", "loaded"), 65.0, []),
        (IDLE, 66.0, [Start(SPARE)]),
    )
    follow(ready(), taken, (Died("a", 9, -9), 60.1, [Start("a")]))
    children = follow(ready(), taken)
    assert children.wake_at() == 60.0 + TAKE_S_MAX
    follow(children, (None, 60.0 + TAKE_S_MAX, [Kill("a")]), (Died("a", 9, -9), 62.1, [Start("a")]))
    assert children.wake_at() is None


def test_a_reload_takes_it_and_a_broken_one_does_not_end_the_reload() -> None:
    follow(
        ready(),
        (ReloadAsked("a", beside=True), 60.0, [AssignSpare("a-2")]),
        (Died("a-2", 9, -9), 60.1, [Start("a-2")]),
        (said("a-2", "loaded"), 65.0, []),  # the old worker is still ending
        (Serving("a-2"), 65.1, [Terminate("a")]),
        (Died("a", 1, 0), 66.0, [Reloaded(True, "a-2 has taken over from a")]),
        (IDLE, 67.0, [Start(SPARE)]),
    )


def test_it_is_killed_when_everything_stops() -> None:
    children = follow(
        ready(),
        (StopAsked("SIGTERM"), 60.0, [Kill(SPARE), Terminate("gateway")]),
        (Died(SPARE, 9, -9), 60.1, []),
        (Died("gateway", 2, 0), 61.0, [Terminate("a")]),
        (Died("a", 1, 0), 62.0, []),
    )
    assert children.status == 0


class AnyHistory(History):
    """Gateway, worker and spare, any of which may be killed at any time."""

    statuses = (-9,)

    def lifecycle(self) -> Lifecycle:
        return lifecycle(RestartLimits(deaths_max=10_000))

    @rule()
    def workers_are_idle(self) -> None:
        self.feed(IDLE)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), word=st.sampled_from(["there", "taken", "loaded"]))
    def one_says_something(self, data: st.DataObject, word: Word) -> None:
        self.feed(said(data.draw(st.sampled_from(sorted(self.alive))), word))

    @invariant()
    def nothing_wakes_for_ever(self) -> None:
        if (at := self.children.wake_at()) is not None and at <= self.now:
            self.feed(None)
            later = self.children.wake_at()
            assert later is None or later > self.now

    def teardown(self) -> None:
        """Check that all three run after a time without deaths."""
        for _ in range(10):
            self.now = max(self.now, self.children.wake_at() or 0.0)
            self.feed(None)
            for name in sorted(self.alive & self.killed):
                self.alive.discard(name)
                self.feed(Died(name, 1, -9))
            for event in (said("a", "loaded"), IDLE, READY):
                self.feed(event)
        assert self.alive == {"a", "gateway", SPARE}
        super().teardown()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = HISTORIES
