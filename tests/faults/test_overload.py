"""Overload: a short run of `tests.faults.overload`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import overload
from tests.faults.raw import on_uvloop
from tests.system import running_system


def test_beyond_capacity_it_serves_on_refuses_the_rest_and_holds_no_more_than_it_may(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--max-waiting", str(overload.WAITING_MAX)]) as system:
        overload.start(system)
        calm, beyond = on_uvloop(overload.run(system, seconds=2, times=8, seed=1))
    assert overload.complaints(calm, beyond) == []
    assert calm.served > 0
    assert beyond.served > 0
    assert len(beyond.refused_s) > 50
    assert min(beyond.retry_after) >= 1
