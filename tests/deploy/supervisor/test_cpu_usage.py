"""Idle detection from CPU time."""

from __future__ import annotations

import pytest

from deploy.supervisor.processes import IDLE_S, IDLE_SHARE_MAX, IdleWatch


@pytest.mark.parametrize(
    ("used_s", "idle"), [(0.0, True), (IDLE_SHARE_MAX * IDLE_S, True), (0.06 * IDLE_S, False), (-1.0, False)]
)
def test_idle_is_little_cpu_time_since_the_last_sample(used_s: float, idle: bool) -> None:
    watch = IdleWatch()
    assert watch.due_in_s(10.0) == 0.0
    assert not watch.is_idle(5.0, 10.0)  # there is nothing to compare with
    assert watch.due_in_s(10.5) == pytest.approx(IDLE_S - 0.5)
    assert not watch.is_idle(5.0, 10.1), "a sample before it is due"
    assert watch.is_idle(5.0 + used_s, 10.0 + IDLE_S) is idle
    assert not watch.is_idle(5.0 + used_s, 60.0), "a sample after a long time"
