"""Replica policy: children that replace each other, each with its own crashes, delays and reloads."""

from __future__ import annotations

from deploy.supervisor.children import ChildState
from deploy.supervisor.events import Died, ReloadAsked, Reloaded, Serving, Start, Terminate
from deploy.supervisor.lifecycle import FAILED_S, Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from protocol.settings import EXIT_CONFIGURATION
from tests.deploy.supervisor.policies import follow

LIMITS = RestartLimits(deaths_max=2)
ONE, OTHER = "worker", "worker.2"


def running() -> Lifecycle:
    children = Lifecycle(
        ["gateway", ONE, OTHER], RestartPolicy(LIMITS), stop_timeout_s=10.0, now=0.0, replicas=[[ONE, OTHER]]
    )
    return follow(children, (None, 0.0, [Start("gateway"), Start(ONE), Start(OTHER)]))


def states(one: ChildState = ChildState.RUNNING, suffix: str = "") -> dict[str, ChildState]:
    return {"gateway": ChildState.RUNNING, f"{ONE}{suffix}": one, f"{OTHER}{suffix}": ChildState.RUNNING}


def die(children: Lifecycle, name: str, now: float, *, times: int) -> float:
    """Let a child crash `times` times, after each restart. Return the time after the last crash."""
    for _ in range(times):
        children.handle(Died(name, 7, 1), now)
        now += 20.0
        children.handle(None, now)
    return now


def failed() -> tuple[Lifecycle, float]:
    """Return the policy in which one replica has crashed too often, and the time."""
    children = running()
    return children, die(children, ONE, 1.0, times=LIMITS.deaths_max + 1)


def test_crash_looping_replica_fails_while_the_other_serves() -> None:
    children, now = failed()
    assert children.status is None
    assert children.states() == states(ChildState.FAILED)
    assert children.stage(ONE, OTHER) == "running"
    assert children.wake_at() is not None
    follow(children, (None, now + FAILED_S, [Start(ONE)]))


def test_wrong_settings_stop_everything_once_they_have_ended_both() -> None:
    children = follow(running(), (Died(ONE, 7, EXIT_CONFIGURATION), 1.0, []))
    assert children.status is None
    follow(
        children,
        (Died(OTHER, 8, EXIT_CONFIGURATION), 1.1, [Terminate("gateway")]),
        (Died("gateway", 9, 0), 2.0, []),
    )
    assert children.status == EXIT_CONFIGURATION


def test_deaths_of_the_one_do_not_count_against_the_other() -> None:
    children = running()
    die(children, ONE, 1.0, times=LIMITS.deaths_max)
    die(children, OTHER, 2.0, times=LIMITS.deaths_max)
    assert children.states() == states()
    ends = children.ends(ONE, OTHER)
    assert (ends.count, children.ends(ONE).count) == (2 * LIMITS.deaths_max, LIMITS.deaths_max)
    assert ends.last.startswith(OTHER)


def test_each_is_reloaded_by_itself_and_the_other_is_not_touched() -> None:
    children = running()
    for name in (ONE, OTHER):
        follow(
            children,
            (ReloadAsked(name, beside=True), 1.0, [Start(f"{name}-2")]),
            (Serving(f"{name}-2"), 2.0, [Terminate(name)]),
            (Died(name, 7, 0), 3.0, [Reloaded(True, f"{name}-2 has taken over from {name}")]),
        )
    assert children.states() == states(suffix="-2")
