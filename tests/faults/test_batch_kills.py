"""Kills while batches run: a short run of `python -m tests.faults.batch_kills`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import batch_kills

KILLS = 3


def test_no_request_of_a_batch_is_lost_or_answered_twice_over_kills(tmp_path: Path) -> None:
    outcomes = batch_kills.run(tmp_path, KILLS, seed=2)
    assert outcomes["kills"] == KILLS
    assert outcomes["answered before the kill"] < outcomes["requests"]
