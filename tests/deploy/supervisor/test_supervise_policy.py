"""Supervisor policy, with a simulation in place of processes."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deploy.supervisor.children import KILL_WAIT_S_MAX, ChildState
from deploy.supervisor.events import (
    Decision,
    Died,
    Event,
    ExitStats,
    Kill,
    NotStarted,
    Report,
    Start,
    StopAsked,
    Terminate,
    reason_of,
)
from deploy.supervisor.lifecycle import Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy

LIMITS = RestartLimits()
STOP_S = 15.0


def lifecycle(*names: str, limits: RestartLimits = LIMITS) -> Lifecycle:
    return Lifecycle(names or ("gateway", "worker"), RestartPolicy(limits), stop_timeout_s=STOP_S, now=0.0)


def deeds(decisions: list[Decision]) -> list[Decision]:
    return [decision for decision in decisions if not isinstance(decision, Report)]


def reports(decisions: list[Decision]) -> list[Report]:
    return [decision for decision in decisions if isinstance(decision, Report)]


def running(*names: str) -> Lifecycle:
    children = lifecycle(*names)
    children.handle(None, 0.0)
    return children


def test_the_delay_doubles_up_to_its_bound() -> None:
    policy = RestartPolicy(RestartLimits(deaths_max=100))
    delays = [policy.died("worker", 1.0, float(now)) for now in range(9)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]


def test_after_a_good_life_it_starts_at_once_and_the_delay_starts_over() -> None:
    policy = RestartPolicy(LIMITS)
    delays = [policy.died("worker", lived_s, 0.0) for lived_s in (1.0, 1.0, 5.0, 5.0, 4.9, 0.0)]
    assert delays == [0.2, 0.4, 0.0, 0.0, 0.2, 0.4]


def test_each_child_has_its_own_delay() -> None:
    policy = RestartPolicy(LIMITS)
    assert policy.died("worker", 1.0, 0.0) == 0.2
    assert policy.died("worker", 1.0, 1.0) == 0.4
    assert policy.died("gateway", 1.0, 2.0) == 0.2


def test_deaths_of_all_children_count_together() -> None:
    policy = RestartPolicy(RestartLimits(deaths_max=2))
    assert policy.died("worker", 1.0, 0.0) is not None
    assert policy.died("gateway", 1.0, 1.0) is not None
    assert policy.died("worker", 1.0, 2.0) is None


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0, 200)), max_size=60), st.integers(1, 12))
def test_it_gives_up_exactly_when_more_than_so_many_died_within_the_window(
    steps: list[tuple[float, float]], deaths_max: int
) -> None:
    limits = RestartLimits(deaths_max=deaths_max)
    policy = RestartPolicy(limits)
    now, deaths = 0.0, []
    for pause_s, lived_s in steps:
        now += pause_s
        deaths.append(now)
        delay_s = policy.died("worker", lived_s, now)
        within = sum(1 for death in deaths if now - death <= limits.window_s)
        assert (delay_s is None) == (within > deaths_max)
        if delay_s is not None and lived_s < limits.stable_s:
            assert limits.delay_s <= delay_s <= limits.delay_s_max
        else:
            assert not delay_s


def test_children_start_in_order_and_at_once() -> None:
    assert lifecycle("gateway", "worker").handle(None, 0.0) == [Start("gateway"), Start("worker")]


def test_two_children_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two children"):
        lifecycle("worker", "worker")


def test_ends_that_nobody_asked_for_are_counted_and_the_last_one_is_told() -> None:
    children = running()
    assert children.ends("worker") == ExitStats()
    children.handle(Died("worker", 123, -9), 3.0)
    assert (children.ends("worker").count, children.ends("worker").reason) == (1, "sigkill")
    children.handle(None, 4.0)
    children.handle(Died("worker", 124, 3, "RuntimeError"), 5.0)
    assert children.ends("worker") == ExitStats(
        2, "worker (pid 124) exited with status 3 after 1.0 s, last output 'RuntimeError'", "exit_3"
    )
    assert children.ends("gateway") == ExitStats()


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Died("worker", 1, -6), "sigabrt"),
        (Died("worker", 1, -40), "signal_40"),
        (Died("worker", 1, 70, "words"), "exit_70"),
        (NotStarted("worker", "no such file"), "not_started"),
    ],
)
def test_an_end_has_a_code_for_programs(event: Died | NotStarted, reason: str) -> None:
    assert reason_of(event) == reason


def test_an_end_that_was_asked_for_is_not_counted() -> None:
    children = running()
    children.handle(StopAsked("SIGTERM"), 1.0)
    children.handle(Died("gateway", 1, 0), 2.0)
    assert children.ends("gateway") == ExitStats()


def test_a_death_is_one_line_that_says_who_how_and_what_now() -> None:
    children = running()
    (line,) = children.handle(Died("worker", 123, -11), 4.34)
    assert line == Report(
        "worker (pid 123) was killed by SIGSEGV after 4.3 s; restarting in 0.2 s", logging.WARNING
    )
    children.handle(None, 13.0)
    died = Died("worker", 124, 3, "RuntimeError", "at step 7 with 1 request aboard: a (decode, 3)")
    (line,) = children.handle(died, 14.0)
    assert line == Report(
        "worker (pid 124) exited with status 3 after 1.0 s, at step 7 with 1 request aboard: a (decode, 3), "
        "last output 'RuntimeError'; restarting in 0.4 s",
        logging.WARNING,
    )


def test_a_signal_without_a_name_is_reported_by_number() -> None:
    (line,) = reports(running("worker").handle(Died("worker", 1, -99), 1.0))
    assert "signal 99" in line.text


def test_only_the_one_that_died_is_started_again_and_not_before_its_time() -> None:
    children = running()
    children.handle(Died("worker", 1, 1), 4.0)
    assert children.wake_at() == pytest.approx(4.2)
    assert children.handle(None, 4.1) == []
    assert children.handle(None, 4.2) == [Start("worker")]
    assert children.wake_at() is None


def test_child_that_cannot_be_started_is_retried() -> None:
    children = running("worker")
    (line,) = children.handle(NotStarted("worker", "no such file"), 0.0)
    assert line == Report("worker could not be started: no such file; restarting in 0.2 s", logging.WARNING)
    assert children.handle(None, 0.2) == [Start("worker")]


def test_wrong_settings_stop_everything_with_their_status() -> None:
    children = running()
    decisions = children.handle(Died("gateway", 1, 78), 1.0)
    assert deeds(decisions) == [Terminate("worker")]
    assert "a restart cannot help" in reports(decisions)[0].text
    assert children.status is None
    children.handle(Died("worker", 2, 0), 2.0)
    assert children.status == 78


def test_too_many_deaths_stop_everything_with_status_1_and_one_clear_line() -> None:
    children = lifecycle("gateway", "worker", limits=RestartLimits(deaths_max=1))
    children.handle(None, 0.0)
    children.handle(Died("worker", 1, 1), 1.0)
    children.handle(None, 1.2)
    decisions = children.handle(Died("worker", 2, 1), 2.0)
    assert deeds(decisions) == [Terminate("gateway")]
    assert [
        (line.level, "more than 1 exits within 300 s, giving up" in line.text) for line in reports(decisions)
    ] == [(logging.ERROR, True)]
    children.handle(Died("gateway", 3, 0), 3.0)
    assert children.status == 1


def test_a_stop_ends_them_one_after_the_other_in_order() -> None:
    children = running()
    assert deeds(children.handle(StopAsked("SIGTERM"), 1.0)) == [Terminate("gateway")]
    assert deeds(children.handle(Died("gateway", 1, 0), 2.0)) == [Terminate("worker")]
    assert deeds(children.handle(Died("worker", 2, 0), 3.0)) == []
    assert children.status == 0


def test_the_time_to_stop_is_counted_for_each_child_from_its_own_turn() -> None:
    children = running()
    children.handle(StopAsked("SIGTERM"), 1.0)
    assert children.wake_at() == 1.0 + STOP_S
    assert deeds(children.handle(None, 1.0 + STOP_S)) == [Kill("gateway")]
    assert deeds(children.handle(Died("gateway", 1, -9), 17.0)) == [Terminate("worker")]
    assert children.wake_at() == 17.0 + STOP_S


def test_child_waiting_for_restart_is_not_started_after_a_stop() -> None:
    children = running()
    children.handle(Died("gateway", 1, 1), 1.0)
    assert deeds(children.handle(StopAsked("SIGINT"), 1.1)) == [Terminate("worker")]
    assert deeds(children.handle(None, 1.2)) == []
    children.handle(Died("worker", 2, 0), 1.3)
    assert children.status == 0


def test_a_second_asking_kills_all_at_once() -> None:
    children = running()
    children.handle(StopAsked("SIGINT"), 1.0)
    assert deeds(children.handle(StopAsked("SIGINT"), 1.5)) == [Kill("gateway"), Kill("worker")]
    assert deeds(children.handle(StopAsked("SIGINT"), 1.6)) == []
    children.handle(Died("worker", 2, -9), 1.7)
    children.handle(Died("gateway", 1, -9), 1.7)
    assert children.status == 0


def test_the_first_asking_while_it_stops_by_itself_kills_nobody() -> None:
    children = running()
    children.handle(Died("gateway", 1, 78), 1.0)
    assert deeds(children.handle(StopAsked("SIGINT"), 1.1)) == []
    assert deeds(children.handle(StopAsked("SIGINT"), 1.2)) == [Kill("worker")]
    children.handle(Died("worker", 2, -9), 1.3)
    assert children.status == 78


def test_child_surviving_sigkill_does_not_delay_shutdown() -> None:
    children = running("worker")
    children.handle(StopAsked("SIGTERM"), 0.0)
    children.handle(None, STOP_S)
    decisions = children.handle(None, STOP_S + KILL_WAIT_S_MAX)
    assert [line.level for line in reports(decisions)] == [logging.ERROR]
    assert children.status == 0
    assert children.handle(Died("worker", 1, -9), 100.0) == []


class AnyHistory(RuleBasedStateMachine):
    """Stateful test: the module's guarantees hold after any events in any order."""

    names = ("gateway", "first worker", "second worker")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.alive: set[str] = set()
        self.stopping = False
        self.children = lifecycle(*self.names, limits=RestartLimits(deaths_max=4))

    @initialize()
    def begin(self) -> None:
        self.feed(None)

    def feed(self, event: Event | None) -> None:
        for decision in self.children.handle(event, self.now):
            match decision:
                case Start(name):
                    assert not self.stopping, "started during a stop"
                    assert name not in self.alive, "started twice"
                    self.alive.add(name)
                case Terminate(name):
                    self.stopping = True
                    assert name in self.alive, "terminated although it does not run"
                    assert not self.held() & set(self.names[: self.names.index(name)]), "out of order"
                case Kill(name):
                    assert self.stopping
                    assert name in self.alive

    def held(self) -> set[str]:
        """Return the children that are alive and not abandoned."""
        return {name for name in self.alive if self.children.states()[name] is not ChildState.GONE}

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), returncode=st.sampled_from([0, 1, 78, -9, -11]), passed_s=st.floats(0, 100))
    def one_dies(self, data: st.DataObject, returncode: int, passed_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.now += passed_s
        self.alive.discard(name)
        self.feed(Died(name, 1, returncode))

    @rule(passed_s=st.floats(0, 400))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s
        self.feed(None)

    @precondition(lambda self: self.children.status is None)
    @rule()
    def stop_is_asked(self) -> None:
        self.stopping = True
        self.feed(StopAsked("SIGTERM"))

    @invariant()
    def it_knows_who_runs(self) -> None:
        states = self.children.states()
        assert all(states[name] is not ChildState.WAITING for name in self.alive)
        assert self.held() == {n for n, s in states.items() if s not in (ChildState.WAITING, ChildState.GONE)}

    @invariant()
    def a_status_means_that_nobody_will_run(self) -> None:
        states = set(self.children.states().values())
        assert (self.children.status is not None) == (states == {ChildState.GONE})

    @invariant()
    def it_does_not_wake_for_what_is_done(self) -> None:
        wake_at = self.children.wake_at()
        assert wake_at is None or wake_at > self.now

    @invariant()
    def nobody_is_left_without_a_way_on(self) -> None:
        # A live process will report its end, or a wake-up time is set, or the supervisor has finished.
        assert self.children.status is not None or self.held() or self.children.wake_at() is not None

    def teardown(self) -> None:
        """Check that a stop completes from any state, by the passage of time alone."""
        self.feed(StopAsked("SIGTERM"))
        self.stopping = True
        for _ in range(3 * len(self.names)):
            if (due := self.children.wake_at()) is None:
                break
            self.now = max(self.now, due)
            self.feed(None)
        assert self.children.status is not None


TestAnyHistory = AnyHistory.TestCase
