"""Replica policy: children that replace each other, each with its own crashes, delays and reloads."""

from __future__ import annotations

from deploy.supervisor.children import ChildState
from deploy.supervisor.events import (
    Decision,
    Died,
    ReloadAsked,
    Reloaded,
    Report,
    Serving,
    Start,
    StopAsked,
    Terminate,
)
from deploy.supervisor.lifecycle import EXIT_GAVE_UP, FAILED_S, Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from protocol.settings import EXIT_CONFIGURATION

LIMITS = RestartLimits(deaths_max=2)
ONE, OTHER = "worker", "worker.2"


def running() -> Lifecycle:
    children = Lifecycle(
        ["gateway", ONE, OTHER],
        RestartPolicy(LIMITS),
        stop_timeout_s=10.0,
        now=0.0,
        replicas=[[ONE, OTHER]],
    )
    assert deeds(children.handle(None, 0.0)) == [Start("gateway"), Start(ONE), Start(OTHER)]
    return children


def deeds(decisions: list[Decision]) -> list[Decision]:
    return [decision for decision in decisions if not isinstance(decision, Report)]


def die(children: Lifecycle, name: str, now: float, *, times: int = 1, status: int = 1) -> float:
    """Let a child crash `times` times, after each restart. Return the time after the last crash."""
    for _ in range(times):
        children.handle(Died(name, 7, status), now)
        now += 20.0
        children.handle(None, now)
    return now


def test_crash_looping_replica_fails_while_the_other_serves() -> None:
    children = running()
    now = die(children, ONE, 1.0, times=LIMITS.deaths_max + 1)
    assert children.status is None
    assert children.states() == {
        "gateway": ChildState.RUNNING,
        ONE: ChildState.FAILED,
        OTHER: ChildState.RUNNING,
    }
    assert children.stage(ONE, OTHER) == "running"
    assert children.wake_at() is not None
    assert deeds(children.handle(None, now + FAILED_S)) == [Start(ONE)]


def test_when_neither_can_be_kept_alive_everything_stops() -> None:
    children = running()
    now = die(children, ONE, 1.0, times=LIMITS.deaths_max + 1)
    for _ in range(LIMITS.deaths_max):
        children.handle(Died(OTHER, 7, 1), now)
        now += 11.0
        children.handle(None, now)
    assert deeds(children.handle(Died(OTHER, 7, 1), now)) == [Terminate("gateway")]
    children.handle(Died("gateway", 8, 0), now)
    assert children.status == EXIT_GAVE_UP


def test_wrong_settings_stop_everything_once_they_have_ended_both() -> None:
    children = running()
    children.handle(Died(ONE, 7, EXIT_CONFIGURATION), 1.0)
    assert children.status is None
    assert deeds(children.handle(Died(OTHER, 8, EXIT_CONFIGURATION), 1.1)) == [Terminate("gateway")]
    children.handle(Died("gateway", 9, 0), 2.0)
    assert children.status == EXIT_CONFIGURATION


def test_deaths_of_the_one_do_not_count_against_the_other() -> None:
    children = running()
    die(children, ONE, 1.0, times=LIMITS.deaths_max)
    die(children, OTHER, 2.0, times=LIMITS.deaths_max)
    assert children.states() == {
        "gateway": ChildState.RUNNING,
        ONE: ChildState.RUNNING,
        OTHER: ChildState.RUNNING,
    }
    ends = children.ends(ONE, OTHER)
    assert ends.count == 2 * LIMITS.deaths_max
    assert ends.last.startswith(OTHER)
    assert children.ends(ONE).count == LIMITS.deaths_max


def test_each_is_reloaded_by_itself_and_the_other_is_not_touched() -> None:
    children = running()
    for name in (ONE, OTHER):
        assert deeds(children.handle(ReloadAsked(name, beside=True), 1.0)) == [Start(f"{name}-2")]
        assert deeds(children.handle(Serving(f"{name}-2"), 2.0)) == [Terminate(name)]
        ended = deeds(children.handle(Died(name, 7, 0), 3.0))
        assert ended == [Reloaded(True, f"{name}-2 has taken over from {name}")]
    assert children.states() == {
        "gateway": ChildState.RUNNING,
        f"{ONE}-2": ChildState.RUNNING,
        f"{OTHER}-2": ChildState.RUNNING,
    }


def test_a_reload_of_one_that_was_left_alone_starts_it_anew() -> None:
    children = running()
    now = die(children, ONE, 1.0, times=LIMITS.deaths_max + 1)
    done, start = deeds(children.handle(ReloadAsked(ONE, beside=False), now))
    assert isinstance(done, Reloaded)
    assert done.done
    assert start == Start(ONE)


def test_a_stop_ends_one_that_was_left_alone_too() -> None:
    children = running()
    now = die(children, ONE, 1.0, times=LIMITS.deaths_max + 1)
    children.handle(StopAsked("a test"), now)
    for name in ("gateway", OTHER):
        children.handle(Died(name, 7, 0), now)
    assert children.status == 0
