"""When the watchdog declares the model thread hung."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worker.process.watchdog import LOAD_CPU_S, LOAD_STALL_S_MAX, Progress, Watchdog
from worker.ranks.rendezvous import READ_S_MAX

STALL_S = 20.0
LOADED = Progress(is_loaded=True)
LOADING = Progress(loaded=(1, 10), cpu_s=3.0)


def verdict(first: Progress, later: Progress, after_s: float) -> str | None:
    watchdog = Watchdog(STALL_S, 0.0)
    assert watchdog.verdict(first, 0.0) is None
    return watchdog.verdict(later, after_s)


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (replace(LOADED, running=2, steps=7), "no step for 21 s with 2 rows running, 0 waiting"),
        (replace(LOADED, waiting=1, steps=7), "0 rows running, 1 waiting"),
        (replace(LOADED, commands=1), "1 commands unread"),
    ],
)
def test_a_thread_that_has_work_and_makes_no_step_hangs(work: Progress, told: str) -> None:
    assert verdict(work, work, STALL_S) is None
    assert told in (verdict(work, work, STALL_S + 1) or "")


def test_commands_that_come_in_do_not_hide_that_none_is_taken() -> None:
    first, later = replace(LOADED, running=1, steps=7), replace(LOADED, running=1, steps=7, commands=3)
    assert verdict(first, later, STALL_S + 1) is not None


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (LOADED, LOADED),  # no work
        (replace(LOADED, running=1, steps=7), replace(LOADED, running=1, steps=8)),
        (replace(LOADED, commands=2), replace(LOADED, commands=1)),
        (LOADED, replace(LOADED, running=1)),  # work has just arrived
        # waits until its output is sent
        (replace(LOADED, running=1, unsent=9), replace(LOADED, running=1, unsent=9)),
    ],
)
def test_a_thread_that_makes_steps_or_has_no_work_does_not_hang(first: Progress, later: Progress) -> None:
    assert verdict(first, later, STALL_S + 1) is None


def test_a_load_that_goes_on_in_no_way_hangs() -> None:
    assert verdict(LOADING, LOADING, LOAD_STALL_S_MAX) is None
    assert verdict(LOADING, LOADING, LOAD_STALL_S_MAX + 1) == "loading made no progress for 5401 s"
    for later in (replace(LOADING, loaded=(2, 10)), replace(LOADING, cpu_s=3.0 + LOAD_CPU_S), LOADED):
        assert verdict(LOADING, later, LOAD_STALL_S_MAX + 1) is None
    assert LOAD_STALL_S_MAX > READ_S_MAX, "the first rank of a set waits for the others"
