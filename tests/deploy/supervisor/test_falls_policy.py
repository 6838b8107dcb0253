"""When a child is run by its second plan, and that it happens once."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from deploy.supervisor.children import Entry, State
from deploy.supervisor.events import Decision, Died, Fall, Kill, Report, Said, Start, StopAsked
from deploy.supervisor.falls import Falls
from deploy.supervisor.lifecycle import EXIT_GAVE_UP, Lifecycle
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from protocol.settings import EXIT_CONFIGURATION

AFTER_S = 60.0


def lifecycle(limits: RestartLimits | None = None) -> Lifecycle:
    """A gateway, and a set that runs."""
    children = Lifecycle(
        ["gateway", "set"],
        RestartPolicy(limits or RestartLimits()),
        stop_timeout_s=15.0,
        now=0.0,
        loading=["set"],
        falls=Falls({"set": AFTER_S}),
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


def test_nothing_falls_while_everything_stops() -> None:
    children = lifecycle()
    children.handle(died(), 1.0)
    children.handle(StopAsked("test"), 2.0)
    assert Fall("set") not in children.handle(None, 100.0)


@given(st.lists(st.tuples(st.sampled_from(["died", "loaded", "passes"]), st.floats(0, 90)), max_size=40))
def test_it_falls_at_most_once_and_never_before_its_time(events: list[tuple[str, float]]) -> None:
    falls, now, down, fallen = Falls({"set": AFTER_S}), 0.0, None, 0
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
            fallen += 1
    assert fallen <= 1
