"""Kills during disk writes: a short run of `python -m tests.faults.disk_kills`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import disk_kills
from worker.prefixes.disk import DiskTier
from worker.prefixes.files import Record

KILLS = 8
WITHIN_S = 20.0


def test_a_process_killed_while_it_writes_leaves_whole_items_or_none(tmp_path: Path) -> None:
    outcomes = disk_kills.run(tmp_path, KILLS, seed=5, within_s=WITHIN_S)
    # The run must have interrupted writes and stored records.
    assert outcomes["kills"] > 3
    assert outcomes["in a write"] > 0
    assert outcomes["read"] > outcomes["kills"]


def test_an_item_that_is_not_what_was_written_would_be_noticed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, disk_kills.FINGERPRINT)
    good = disk_kills.record_of("ab" * 32)
    tier.write(Record(good.digest, good.about, {}), lambda digest, file_bytes: None)
    tier.close(wait=True)
    with pytest.raises(AssertionError, match="not what was written"):
        disk_kills.run(tmp_path, 1, seed=5)


def test_an_item_that_is_lost_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_kills.Killer, "_run", lambda *_: [f"written {'ab' * 32}\n"])
    with pytest.raises(AssertionError, match="lost"):
        disk_kills.run(tmp_path, 1, seed=5)
