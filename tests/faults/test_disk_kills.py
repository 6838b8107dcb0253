"""Kills during disk writes: a short run of `python -m tests.faults.disk_kills`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import disk_kills

KILLS = 8
WITHIN_S = 20.0


def test_a_process_killed_while_it_writes_leaves_whole_items_or_none(tmp_path: Path) -> None:
    outcomes = disk_kills.run(tmp_path, KILLS, seed=5, within_s=WITHIN_S)
    # The run must have interrupted writes and stored records.
    assert outcomes["kills"] > 3
    assert outcomes["in a write"] > 0
    assert outcomes["read"] > outcomes["kills"]
