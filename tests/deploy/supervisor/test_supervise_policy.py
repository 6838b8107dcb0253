"""Supervisor policy for deaths, stops, reloads and replicas, with a simulation in place of processes."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from deploy.supervisor.children import KILL_WAIT_S_MAX, ChildState
from deploy.supervisor.events import (
    Died,
    Event,
    ExitStats,
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
from deploy.supervisor.lifecycle import FAILED_S, Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from protocol.settings.reader import EXIT_CONFIGURATION
from tests.deploy.supervisor import policies
from tests.deploy.supervisor.policies import DONE, HISTORIES, REFUSED, History, after, deeds, follow, reports

LIMITS = RestartLimits()
STOP_S = policies.STOP_S


def lifecycle(*names: str, limits: RestartLimits = LIMITS, **timeouts_s: float) -> Lifecycle:
    return policies.lifecycle(names or ("gateway", "worker"), limits, **timeouts_s)


def running(*names: str) -> Lifecycle:
    return after(lifecycle(*names))


@pytest.mark.parametrize(
    ("lives_s", "delays_s"),
    [
        ([1.0] * 9, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]),
        ([1.0, 1.0, 5.0, 5.0, 4.9, 0.0], [0.2, 0.4, 0.0, 0.0, 0.2, 0.4]),
    ],
    ids=["it doubles up to its bound", "a good life resets it"],
)
def test_each_child_has_a_delay_of_its_own(lives_s: list[float], delays_s: list[float]) -> None:
    policy = RestartPolicy(RestartLimits(deaths_max=100))
    assert [policy.died("worker", lived_s, 0.0) for lived_s in lives_s] == delays_s
    assert policy.died("gateway", 1.0, 0.0) == 0.2


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0, 200)), max_size=60), st.integers(1, 12))
def test_it_gives_up_exactly_when_more_than_so_many_died_within_the_window(
    steps: list[tuple[float, float]], deaths_max: int
) -> None:
    limits = RestartLimits(deaths_max=deaths_max)
    policy = RestartPolicy(limits)
    now, deaths = 0.0, []
    for number, (pause_s, lived_s) in enumerate(steps):
        now += pause_s
        deaths.append(now)
        delay_s = policy.died("worker" if number % 3 else "gateway", lived_s, now)
        within = sum(1 for death in deaths if now - death <= limits.window_s)
        assert (delay_s is None) == (within > deaths_max)
        if delay_s is not None and lived_s < limits.stable_s:
            assert limits.delay_s <= delay_s <= limits.delay_s_max
        else:
            assert not delay_s


def test_a_death_is_one_line_that_says_who_how_and_what_now_and_is_counted() -> None:
    children = running()
    assert children.ends("worker") == ExitStats()
    [line] = children.handle(Died("worker", 123, -11), 4.34)
    assert line == Report(
        "worker (pid 123) was killed by SIGSEGV after 4.3 s; restarting in 0.2 s", logging.WARNING
    )
    assert (children.ends("worker").count, children.ends("worker").reason) == (1, "sigsegv")
    assert children.wake_at() == pytest.approx(4.54)
    follow(children, (None, 4.5, []), (None, 13.0, [Start("worker")]))
    assert children.wake_at() is None
    died = Died("worker", 124, 3, "RuntimeError", "at step 7 with 1 request aboard: a (decode, 3)")
    [line] = children.handle(died, 14.0)
    told = (
        "worker (pid 124) exited with status 3 after 1.0 s, at step 7 with 1 request aboard: a (decode, 3), "
        "last output 'RuntimeError'"
    )
    assert line == Report(f"{told}; restarting in 0.4 s", logging.WARNING)
    assert children.ends("worker") == ExitStats(2, told, "exit_3")
    children.handle(StopAsked("SIGTERM"), 15.0)
    children.handle(Died("gateway", 1, 0), 15.0)
    assert children.ends("gateway") == ExitStats(), "this end was asked for"


def test_wrong_settings_stop_everything_with_their_status() -> None:
    children = running()
    decisions = children.handle(Died("gateway", 1, 78), 1.0)
    assert deeds(decisions) == [Terminate("worker")]
    assert "a restart cannot help" in reports(decisions)[0].text
    assert children.status is None
    # The first signal while it stops by itself kills nobody, the second one does.
    follow(
        children, (StopAsked("SIGINT"), 1.1, []), (StopAsked("SIGINT"), 1.2, [Kill("worker")]),
        (Died("worker", 2, -9), 1.3, []),
    )  # fmt: skip
    assert children.status == 78


def test_too_many_deaths_stop_everything_with_status_1_and_one_clear_line() -> None:
    children = after(lifecycle(limits=RestartLimits(deaths_max=1)))
    children.handle(Died("worker", 1, 1), 1.0)
    children.handle(None, 1.2)
    decisions = children.handle(Died("worker", 2, 1), 2.0)
    assert deeds(decisions) == [Terminate("gateway")]
    [line] = reports(decisions)
    assert line.level == logging.ERROR
    assert "more than 1 exits within 300 s, giving up" in line.text
    children.handle(Died("gateway", 3, 0), 3.0)
    assert children.status == 1


def test_child_surviving_sigkill_does_not_delay_shutdown() -> None:
    children = after(running("worker"), StopAsked("SIGTERM"), now=0.0)
    children.handle(None, STOP_S)
    [line] = reports(children.handle(None, STOP_S + KILL_WAIT_S_MAX))
    assert (line.level, children.status) == (logging.ERROR, 0)
    assert children.handle(Died("worker", 1, -9), 100.0) == []


# --- reloads -------------------------------------------------------------------------------------------

DRAIN_S, READY_S = 10.0, 600.0
BESIDE, AFTER = ReloadAsked("worker", beside=True), ReloadAsked("worker", beside=False)


def reloadable() -> Lifecycle:
    return lifecycle(drain_timeout_s=DRAIN_S, ready_timeout_s=READY_S)


def test_the_old_one_is_told_to_end_when_the_new_one_serves_and_not_before() -> None:
    follow(
        after(reloadable()),
        (BESIDE, 1.0, [Start("worker-2")]),
        (Serving("worker"), 2.0, []),
        (Serving("worker-2"), 3.0, [Terminate("worker")]),
        (Died("worker", 1, 0), 4.0, [Reloaded(True, "worker-2 has taken over from worker")]),
        (ReloadAsked("worker-2", beside=True), 5.0, [Start("worker")]),
    )


def test_without_room_the_old_one_ends_first() -> None:
    follow(
        after(reloadable()),
        (AFTER, 1.0, [Terminate("worker")]),
        (Serving("worker"), 1.5, []),
        (Died("worker", 1, 0), 2.0, [Start("worker")]),
        (Serving("worker"), 3.0, [Reloaded(True, "worker was stopped and started again")]),
    )


@pytest.mark.parametrize("death", [Died("worker-2", 2, 78), NotStarted("worker-2", "no such file")])
def test_a_successor_that_dies_counts_as_no_death_and_changes_nothing(death: Event) -> None:
    children = follow(after(reloadable(), BESIDE), (death, 2.0, [REFUSED]))
    assert (children.states(), children.wake_at()) == (
        {"gateway": ChildState.RUNNING, "worker": ChildState.RUNNING},
        None,
    )


def test_a_successor_that_takes_too_long_is_told_to_end() -> None:
    children = after(reloadable(), BESIDE)
    assert children.wake_at() == 1.0 + READY_S
    follow(
        children,
        (
            None,
            1.0 + READY_S,
            [Reloaded(False, "worker-2 was not ready within 600 s"), Terminate("worker-2")],
        ),
        (BESIDE, 602.0, [Reloaded(False, "a reload is already in progress")]),
        (Died("worker-2", 2, 0), 603.0, []),
        (BESIDE, 604.0, [Start("worker-2")]),
    )


def test_the_old_one_gets_time_for_its_requests_and_is_then_killed() -> None:
    children, end = after(reloadable(), BESIDE, Serving("worker-2")), 1.0 + STOP_S + DRAIN_S
    assert children.wake_at() == end
    follow(
        children,
        (None, end, [Kill("worker")]),
        (None, end + KILL_WAIT_S_MAX, [DONE]),
        (Died("worker", 1, -9), 100.0, []),
    )


# --- replicas ------------------------------------------------------------------------------------------

FEW = RestartLimits(deaths_max=2)
ONE, OTHER = "worker", "worker.2"


def replicas() -> Lifecycle:
    children = policies.lifecycle(("gateway", ONE, OTHER), FEW, replicas=[[ONE, OTHER]])
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
    children = replicas()
    return children, die(children, ONE, 1.0, times=FEW.deaths_max + 1)


def test_crash_looping_replica_fails_while_the_other_serves() -> None:
    children, now = failed()
    assert children.status is None
    assert children.states() == states(ChildState.FAILED)
    assert children.stage(ONE, OTHER) == "running"
    assert children.wake_at() is not None
    follow(children, (None, now + FAILED_S, [Start(ONE)]))


def test_wrong_settings_stop_everything_once_they_have_ended_both() -> None:
    children = follow(replicas(), (Died(ONE, 7, EXIT_CONFIGURATION), 1.0, []))
    assert children.status is None
    follow(
        children,
        (Died(OTHER, 8, EXIT_CONFIGURATION), 1.1, [Terminate("gateway")]),
        (Died("gateway", 9, 0), 2.0, []),
    )
    assert children.status == EXIT_CONFIGURATION


def test_deaths_of_the_one_do_not_count_against_the_other() -> None:
    children = replicas()
    die(children, ONE, 1.0, times=FEW.deaths_max)
    die(children, OTHER, 2.0, times=FEW.deaths_max)
    assert children.states() == states()
    ends = children.ends(ONE, OTHER)
    assert (ends.count, children.ends(ONE).count) == (2 * FEW.deaths_max, FEW.deaths_max)
    assert ends.last.startswith(OTHER)


def test_each_is_reloaded_by_itself_and_the_other_is_not_touched() -> None:
    children = replicas()
    for name in (ONE, OTHER):
        follow(
            children,
            (ReloadAsked(name, beside=True), 1.0, [Start(f"{name}-2")]),
            (Serving(f"{name}-2"), 2.0, [Terminate(name)]),
            (Died(name, 7, 0), 3.0, [Reloaded(True, f"{name}-2 has taken over from {name}")]),
        )
    assert children.states() == states(suffix="-2")


# --- any history ---------------------------------------------------------------------------------------


class AnyHistory(History):
    names = ("gateway", "first worker", "second worker")
    statuses = (0, 1, 78, -9, -11)

    def lifecycle(self) -> Lifecycle:
        return lifecycle(*self.names, limits=RestartLimits(deaths_max=4))

    def check(self, decision: Terminate | Kill) -> None:
        if isinstance(decision, Kill):
            assert self.stopping
            return
        self.stopping = True
        assert not self.held() & set(self.names[: self.names.index(decision.name)]), "out of order"

    def held(self) -> set[str]:
        """Return the children that are alive and not abandoned."""
        return {name for name in self.alive if self.children.states()[name] is not ChildState.GONE}

    @precondition(lambda self: self.children.status is None)
    @rule()
    def stop_is_asked(self) -> None:
        self.stop()

    @invariant()
    def it_knows_exactly_who_runs(self) -> None:
        states = self.children.states()
        assert all(states[name] is not ChildState.WAITING for name in self.alive)
        assert self.held() == {n for n, s in states.items() if s not in (ChildState.WAITING, ChildState.GONE)}
        assert (self.children.status is not None) == (set(states.values()) == {ChildState.GONE})

    @invariant()
    def it_does_not_wake_for_what_is_done(self) -> None:
        wake_at = self.children.wake_at()
        assert wake_at is None or wake_at > self.now
        assert self.children.status is not None or self.held() or wake_at is not None


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = HISTORIES
