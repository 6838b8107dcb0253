"""Kills during disk writes: a short run of `python -m tests.faults.disk_kills`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import disk_kills


def test_a_process_killed_while_it_writes_leaves_whole_items_or_none(tmp_path: Path) -> None:
    outcomes = disk_kills.run(tmp_path, 8, seed=5)
    # The run must have interrupted writes and stored records.
    assert outcomes["kills"] == 8
    assert outcomes["in a write"] > 0
    assert outcomes["read"] > outcomes["kills"]
