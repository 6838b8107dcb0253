"""When a child is run by its next plan, which ends with the last one."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from deploy.supervisor.children import Entry, State
from deploy.supervisor.events import (
    Decision,
    Died,
    Fall,
    Idle,
    Kill,
    ReloadAsked,
    Reloaded,
    Report,
    Said,
    Serving,
    Start,
    StopAsked,
    Terminate,
)
from deploy.supervisor.falls import Falls
from deploy.supervisor.lifecycle import EXIT_GAVE_UP, Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from protocol.settings import EXIT_CONFIGURATION

AFTER_S = 60.0
READY_S = 600.0


def lifecycle(limits: RestartLimits | None = None, plans: int = 1) -> Lifecycle:
    """A gateway, and a set that runs, with so many further plans."""
    children = Lifecycle(
        ["gateway", "set"],
        RestartPolicy(limits or RestartLimits()),
        stop_timeout_s=15.0,
        now=0.0,
        loading=["set"],
        falls=Falls({"set": AFTER_S}, {"set": plans}),
        ready_timeout_s=READY_S,
    )
    assert children.handle(None, 0.0) == [Start("gateway"), Start("set")]
    return children


def deeds(decisions: Collection[Decision]) -> list[Decision]:
    return [decision for decision in decisions if not isinstance(decision, Report)]


def died(status: int = 70) -> Died:
    return Died("set", 7, status)


def test_one_that_is_not_back_in_time_is_killed_and_starts_anew_by_its_second_plan() -> None:
    children = lifecycle()
    children.handle(Said("set", 7, "loaded"), 10.0)
    assert deeds(children.handle(died(), 100.0)) == [Start("set")]
    assert children.wake_at() == 100.0 + AFTER_S
    assert deeds(children.handle(None, 159.0)) == []
    assert deeds(children.handle(None, 160.0)) == [Fall("set"), Kill("set")]
    assert deeds(children.handle(died(-9), 160.5)) == [Start("set")]
    assert children.wake_at() is None
    assert deeds(children.handle(None, 1000.0)) == []


def test_one_that_waits_to_be_started_need_not_be_killed() -> None:
    children = lifecycle(RestartLimits(deaths_max=1000, delay_s=100.0, delay_s_max=100.0))
    assert deeds(children.handle(died(), 1.0)) == []
    assert deeds(children.handle(None, 61.0)) == [Fall("set"), Start("set")]


def test_deaths_on_the_way_back_do_not_put_it_off_and_a_good_start_does() -> None:
    children = lifecycle(RestartLimits(deaths_max=1000, delay_s=0.1, delay_s_max=0.1))
    children.handle(died(), 10.0)
    children.handle(None, 10.9)
    for now in range(11, 69):
        assert Fall("set") not in children.handle(died(), float(now))
        children.handle(None, now + 0.9)
    children.handle(Said("set", 7, "loaded"), 69.5)
    assert deeds(children.handle(None, 90.0)) == []
    assert children.wake_at() is None


def test_what_no_restart_can_cure_the_second_plan_may() -> None:
    children = lifecycle()
    assert deeds(children.handle(died(EXIT_CONFIGURATION), 1.0)) == [Fall("set"), Start("set")]
    assert children.status is None
    children.handle(died(EXIT_CONFIGURATION), 2.0)
    children.handle(Died("gateway", 1, 0), 3.0)
    assert children.status == EXIT_CONFIGURATION


def test_one_that_dies_too_often_falls_before_everything_is_given_up() -> None:
    children = lifecycle(RestartLimits(deaths_max=0))
    assert deeds(children.handle(died(), 1.0)) == [Fall("set"), Start("set")]
    children.handle(died(), 2.0)
    children.handle(Died("gateway", 1, 0), 3.0)
    assert children.status == EXIT_GAVE_UP


def test_each_plan_has_its_time_to_load_and_then_the_next_one_takes_over() -> None:
    children = lifecycle(plans=3)
    children.handle(died(), 10.0)
    assert deeds(children.handle(None, 15.0)) == [Start("set")]
    assert deeds(children.handle(None, 70.0)) == [Fall("set"), Kill("set")]
    assert deeds(children.handle(died(-9), 71.0)) == [Start("set")]
    assert deeds(children.handle(None, 129.0)) == []
    assert deeds(children.handle(None, 130.0)) == [Fall("set"), Kill("set")]
    children.handle(died(-9), 131.0)
    assert deeds(children.handle(died(EXIT_CONFIGURATION), 140.0)) == [Fall("set"), Start("set")]
    told = [
        each.text for each in children.handle(died(EXIT_CONFIGURATION), 150.0) if isinstance(each, Report)
    ]
    assert "everything stops" in told[0]


def test_what_has_loaded_by_its_plan_has_the_ones_behind_it_left() -> None:
    children = lifecycle(plans=2)
    assert deeds(children.handle(died(EXIT_CONFIGURATION), 1.0)) == [Fall("set"), Start("set")]
    children.handle(Said("set", 7, "loaded"), 5.0)
    assert deeds(children.handle(None, 500.0)) == []
    children.handle(died(), 600.0)
    assert deeds(children.handle(None, 660.0)) == [Fall("set"), Kill("set")]


def test_a_reload_that_succeeds_begins_with_all_plans_again() -> None:
    children = lifecycle()
    children.handle(died(EXIT_CONFIGURATION), 1.0)
    children.handle(Said("set", 7, "loaded"), 5.0)
    back = ReloadAsked("set", beside=False, swap=True, plans=1)
    assert deeds(children.handle(back, 10.0)) == []
    assert deeds(children.handle(Idle("set"), 11.0)) == [Terminate("set")]
    assert deeds(children.handle(Died("set", 7, 0), 12.0)) == [Start("set")]
    assert isinstance(deeds(children.handle(Serving("set"), 20.0))[0], Reloaded)
    assert deeds(children.handle(died(EXIT_CONFIGURATION), 30.0)) == [Fall("set"), Start("set")]


def test_a_reload_that_fails_leaves_what_has_taken_over_where_it_was() -> None:
    children = lifecycle()
    children.handle(died(EXIT_CONFIGURATION), 1.0)
    children.handle(ReloadAsked("set", beside=False, swap=True, plans=1), 10.0)
    children.handle(Idle("set"), 11.0)
    children.handle(Died("set", 7, 0), 12.0)
    failed, started = deeds(children.handle(died(), 20.0))
    assert isinstance(failed, Reloaded)
    assert not failed.done
    assert started == Start("set")
    assert children.handle(died(EXIT_CONFIGURATION), 30.0)[-1] != Start("set")


def test_one_that_nobody_wants_any_more_wakes_nobody() -> None:
    falls = Falls({"set": AFTER_S})
    falls.died("set", 0.0)
    entry = Entry("set", "set", State.PARKED)
    assert falls.follow([entry], AFTER_S) == []
    assert falls.wake_at() == []
    falls.died("set", 100.0)
    entry.state = State.ENDING
    assert falls.follow([entry], 100.0 + AFTER_S) == []
    assert falls.wake_at() > [100.0 + AFTER_S]


def test_nothing_falls_while_everything_stops() -> None:
    children = lifecycle()
    children.handle(died(), 1.0)
    children.handle(StopAsked("test"), 2.0)
    assert Fall("set") not in children.handle(None, 100.0)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["died", "loaded", "passes"]), st.floats(0, 90)), max_size=40),
)
def test_it_falls_once_for_each_plan_and_never_before_its_time(
    plans: int, events: list[tuple[str, float]]
) -> None:
    falls, now, down, fallen = Falls({"set": AFTER_S}, {"set": plans}), 0.0, None, 0
    for what, passed in events:
        now += passed
        if what == "died":
            falls.died("set", now)
            down = now if down is None else down
        elif what == "loaded":
            falls.loaded("set")
            down = None
        if falls.is_due("set", now):
            assert down is not None
            assert now - down >= AFTER_S
            falls.fall(Entry("set", "set", State.WAITING), "", now)
            fallen, down = fallen + 1, now
    assert fallen <= plans
