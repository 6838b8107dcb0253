"""The longest restorable prefix on a path, where only a part of it is in memory."""

from __future__ import annotations

from worker.core.prefix.index import longest
from worker.core.prefix.tree import BlockPart, Snapshot, block_behind, root_of
from worker.values import CacheSpec


def test_a_snapshot_behind_a_block_on_disk_is_not_in_memory_with_its_prefix() -> None:
    first = block_behind(root_of(""), (1, 2, 3, 4), 0, 0)
    second = block_behind(first, (5, 6, 7, 8), 4, 0)
    second.payload = "columns"
    second.snapshots[8] = snapshot = Snapshot("digest", second, payload="states", at=8)
    path = [BlockPart(first, 4), BlockPart(second, 4)]
    shape = CacheSpec(has_states=True)
    assert longest(path, shape, ram_only=True) == (0, None)
    assert longest(path, shape) == (8, snapshot)
    first.payload = "columns"
    assert longest(path, shape, ram_only=True) == (8, snapshot)
