"""Supervisor policy for reloads, without processes."""

from __future__ import annotations

import pytest

from deploy.supervisor.children import KILL_WAIT_S_MAX, ChildState
from deploy.supervisor.events import (
    Died,
    Event,
    Kill,
    NotStarted,
    ReloadAsked,
    Reloaded,
    Serving,
    Start,
    Terminate,
)
from deploy.supervisor.lifecycle import Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from tests.deploy.supervisor.policies import DONE, REFUSED, after, follow

STOP_S, DRAIN_S, READY_S = 15.0, 10.0, 600.0
BESIDE, AFTER = ReloadAsked("worker", beside=True), ReloadAsked("worker", beside=False)
BUSY = Reloaded(False, "a reload is already in progress")
TAKEN_OVER = Reloaded(True, "worker-2 has taken over from worker")
UNCHANGED = {"gateway": ChildState.RUNNING, "worker": ChildState.RUNNING}


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
    return after(lifecycle(), *events)


def test_the_old_one_is_told_to_end_when_the_new_one_serves_and_not_before() -> None:
    follow(
        running(),
        (BESIDE, 1.0, [Start("worker-2")]),
        (Serving("worker"), 2.0, []),
        (Serving("worker-2"), 3.0, [Terminate("worker")]),
        (Died("worker", 1, 0), 4.0, [TAKEN_OVER]),
        (ReloadAsked("worker-2", beside=True), 5.0, [Start("worker")]),
    )


def test_without_room_the_old_one_ends_first() -> None:
    follow(
        running(),
        (AFTER, 1.0, [Terminate("worker")]),
        (Serving("worker"), 1.5, []),
        (Died("worker", 1, 0), 2.0, [Start("worker")]),
        (Serving("worker"), 3.0, [Reloaded(True, "worker was stopped and started again")]),
    )


@pytest.mark.parametrize("death", [Died("worker-2", 2, 78), NotStarted("worker-2", "no such file")])
def test_a_successor_that_dies_counts_as_no_death_and_changes_nothing(death: Event) -> None:
    children = follow(running(BESIDE), (death, 2.0, [REFUSED]))
    assert (children.states(), children.wake_at()) == (UNCHANGED, None)


def test_a_successor_that_takes_too_long_is_told_to_end() -> None:
    children = running(BESIDE)
    assert children.wake_at() == 1.0 + READY_S
    follow(
        children,
        (
            None,
            1.0 + READY_S,
            [Reloaded(False, "worker-2 was not ready within 600 s"), Terminate("worker-2")],
        ),
        (BESIDE, 602.0, [BUSY]),
        (Died("worker-2", 2, 0), 603.0, []),
        (BESIDE, 604.0, [Start("worker-2")]),
    )


def test_the_old_one_gets_time_for_its_requests_and_is_then_killed() -> None:
    children, end = running(BESIDE, Serving("worker-2")), 1.0 + STOP_S + DRAIN_S
    assert children.wake_at() == end
    follow(
        children,
        (None, end, [Kill("worker")]),
        (None, end + KILL_WAIT_S_MAX, [DONE]),
        (Died("worker", 1, -9), 100.0, []),
    )
