"""Hundreds of faults leak nothing: a short run of `tests.faults.leaks`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import leaks


def test_kills_disconnects_late_requests_and_a_bad_connection_leak_nothing(tmp_path: Path) -> None:
    outcome = leaks.besiege(tmp_path, faults=60, kills=1, seed=5, warm=20)
    assert outcome.left == []
    assert outcome.faults["killed"] == 2
    assert outcome.faults.total() >= 60
    assert outcome.answers > 0
    gateway, worker = outcome.gateway_bytes, outcome.worker_bytes
    assert gateway[1] - gateway[0] < leaks.GROWTH_BYTES_MAX
    assert worker[1] - worker[0] < leaks.GROWTH_BYTES_MAX
