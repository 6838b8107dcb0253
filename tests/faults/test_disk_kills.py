"""Kills during disk writes: a short run of `python -m tests.faults.disk_kills`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import disk_kills

KILLS, ROUNDS_MAX = 8, 10


def test_a_process_killed_while_it_writes_leaves_whole_items_or_none(tmp_path: Path) -> None:
    # Where in its work a kill meets the process is chance: some must interrupt a write.
    for seed in range(ROUNDS_MAX):
        (folder := tmp_path / str(seed)).mkdir()
        outcomes = disk_kills.run(folder, KILLS, seed)
        assert outcomes["kills"] == KILLS
        assert outcomes["read"] > KILLS
        if outcomes["in a write"]:
            return
    raise AssertionError("no kill interrupted a write")
