"""Fallback policy: when a child switches to its next plan, until the last one."""

from __future__ import annotations

import pytest

from deploy.supervisor.events import (
    ChildMessage,
    Died,
    Idle,
    Kill,
    ReloadAsked,
    Serving,
    Start,
    StopAsked,
    Terminate,
    UseFallback,
)
from deploy.supervisor.fallbacks import Fallbacks
from deploy.supervisor.lifecycle import EXIT_GAVE_UP, Lifecycle
from deploy.supervisor.restarts import RestartLimits
from protocol.settings.reader import EXIT_CONFIGURATION
from tests.deploy.supervisor import policies
from tests.deploy.supervisor.policies import DONE, REFUSED, follow, reports

AFTER_S = 60.0


def lifecycle(limits: RestartLimits | None = None, plans: int = 1) -> Lifecycle:
    """Return the policy of a gateway and a running set of ranks with `plans` fallbacks."""
    fallbacks = Fallbacks({"set": AFTER_S}, {"set": plans})
    options = {"loading": ["set"], "fallbacks": fallbacks, "ready_timeout_s": 600.0}
    children = policies.lifecycle(["gateway", "set"], limits, **options)
    assert children.handle(None, 0.0) == [Start("gateway"), Start("set")]
    return children


def died(status: int = 70) -> Died:
    return Died("set", 7, status)


FALL = [UseFallback("set"), Kill("set")]
FALL_AND_START = [UseFallback("set"), Start("set")]
LOADED = ChildMessage("set", 7, "loaded")
WRONG = died(EXIT_CONFIGURATION)


def test_child_not_loaded_in_time_is_killed_and_restarts_with_its_fallback_plan() -> None:
    children = follow(lifecycle(), (LOADED, 10.0, []), (died(), 100.0, [Start("set")]))
    assert children.wake_at() == 100.0 + AFTER_S
    follow(children, (None, 159.0, []), (None, 160.0, FALL), (died(-9), 160.5, [Start("set")]))
    assert children.wake_at() is None
    follow(children, (None, 1000.0, []))


@pytest.mark.parametrize(
    ("limits", "death", "status"),
    [(RestartLimits(), WRONG, EXIT_CONFIGURATION), (RestartLimits(deaths_max=0), died(), EXIT_GAVE_UP)],
    ids=["configuration error", "crash loop"],
)
def test_fallback_comes_before_the_end_of_all(limits: RestartLimits, death: Died, status: int) -> None:
    children = follow(lifecycle(limits), (death, 1.0, FALL_AND_START))
    assert children.status is None
    children.handle(death, 2.0)
    children.handle(Died("gateway", 1, 0), 3.0)
    assert children.status == status


def test_each_plan_has_its_time_to_load_and_then_the_next_one_takes_over() -> None:
    children = follow(
        lifecycle(plans=3),
        (died(), 10.0, []),
        (None, 15.0, [Start("set")]),
        (None, 70.0, FALL),
        (died(-9), 71.0, [Start("set")]),
        (None, 129.0, []),
        (None, 130.0, FALL),
        (died(-9), 131.0, [Start("set")]),
        (WRONG, 140.0, FALL_AND_START),
    )
    assert "stopping everything" in reports(children.handle(WRONG, 150.0))[0].text


def test_a_reload_that_succeeds_begins_with_all_plans_again_and_one_that_fails_does_not() -> None:
    swap = ReloadAsked("set", beside=False, swap=True, plans=1)

    def swapped() -> Lifecycle:
        return follow(
            lifecycle(),
            (WRONG, 1.0, FALL_AND_START),
            (LOADED, 5.0, []),
            (swap, 10.0, []),
            (Idle("set"), 11.0, [Terminate("set")]),
            (Died("set", 7, 0), 12.0, [Start("set")]),
        )

    follow(swapped(), (Serving("set"), 20.0, [DONE]), (WRONG, 30.0, FALL_AND_START))
    children = follow(swapped(), (died(), 20.0, [REFUSED, Start("set")]))
    assert children.handle(WRONG, 30.0)[-1] != Start("set")


def test_fallback_is_not_used_during_shutdown() -> None:
    children = lifecycle()
    children.handle(died(), 1.0)
    children.handle(StopAsked("test"), 2.0)
    assert UseFallback("set") not in children.handle(None, 100.0)
