"""Eviction policy of the prefix cache (GreedyDual, N. Young 1994), and a ghost list of evicted keys.

The item with the lowest worth is evicted first; among equals, the least recently used one. A lookup sets an
item's worth to `age` plus a bonus for past usefulness, and `age` rises to the worth of evicted items, so old
usefulness expires. Superseded snapshots go before all others, pinned items after all others. Lookups, uses,
sharing, pins and holds apply to all ancestors too, so no item is worth less than its descendants, and leaves
go first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from worker.prefixes.items import Block, BlockPart, Item, Snapshot

FORGOTTEN_MAX = 4096
_BEGINNING = 16
_SPARE_ENTRIES = 64

Rank = tuple[bool, bool, int, int, int]


def worth(item: Item) -> int:
    """Return the bonus beyond `age` that a lookup gives to an item."""
    return 1 + (item.uses > 0) + 2 * item.is_shared


def rank(item: Item) -> Rank:
    """Return the eviction rank; the lowest is evicted first."""
    return (item.is_pinned, not is_superseded(item), item.worth, item.used_at, -item.position)


def is_superseded(item: Item) -> bool:
    """Whether the item is a snapshot that only a newly diverging prompt could use."""
    return isinstance(item, Snapshot) and item.is_superseded and not item.is_shared


class Tier:
    """Storage tier with an eviction queue. `bytes`: total size of its items.

    Ranks change while items are queued, mostly upwards. An entry with an outdated lower rank is queued again
    with its current one when popped; `push` reports a lowered rank. Entries of removed items are skipped, and
    purged when there are many.
    """

    def __init__(self, size: Literal["nbytes", "disk_bytes"]) -> None:
        """`size`: the attribute with an item's size in this tier, 0 if it is not here."""
        self.bytes = 0
        self._size = size
        self._count = 0
        self._queue: list[tuple[Rank, int, Item]] = []
        self._numbers = itertools.count()

    def has(self, item: Item) -> bool:
        return bool(getattr(item, self._size))

    def put(self, item: Item, size: int) -> None:
        """Add an item that is not in this tier. `size`: at least 1."""
        assert size > 0, size
        assert not self.has(item), item.digest
        setattr(item, self._size, size)
        self.bytes += size
        self._count += 1
        self.push(item)

    def take(self, item: Item) -> None:
        """Remove an item, if it is in this tier."""
        self._count -= self.has(item)
        self.bytes -= getattr(item, self._size)
        setattr(item, self._size, 0)

    def push(self, item: Item) -> None:
        """Queue an item, or queue it again after its rank was lowered."""
        if len(self._queue) > 2 * self._count + _SPARE_ENTRIES:
            there = dict.fromkeys(item for _, _, item in self._queue if self.has(item))
            self._queue = [(rank(item), next(self._numbers), item) for item in there]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (rank(item), next(self._numbers), item))

    def excess(self, limit: int) -> Iterator[Item]:
        """Iterate over items to evict until at most `limit` bytes or only held items remain.

        The caller must remove each item before requesting the next.
        """
        held: list[Item] = []
        while self.bytes > limit and self._queue:
            known, _, item = heapq.heappop(self._queue)
            if not self.has(item):
                continue
            if rank(item) > known:
                heapq.heappush(self._queue, (rank(item), next(self._numbers), item))
            elif item.holds:
                held.append(item)
            else:
                yield item
        for item in held:
            self.push(item)


class EvictedKeys:
    """Ghost list: hashes of the last few thousand evicted items, to report misses as evictions. A hash
    collision only falsifies a reported miss reason."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}
        self._snapshots: dict[str, int] = {}

    def add(self, item: Item) -> None:
        if item.parent is None:
            return
        if isinstance(item, Block):
            self._blocks[hash((item.parent.digest, item.first, item.keys[:_BEGINNING]))] = None
        else:
            self._snapshots[item.parent.digest] = item.position
        _bound(self._blocks)
        _bound(self._snapshots)

    def had_block(self, parent: str, keys: tuple[int, ...], first: int) -> bool:
        """Whether a block below `parent` was evicted that began at `first` with the same keys."""
        beginnings = (keys[first : first + count] for count in range(1, _BEGINNING + 1))
        return any(hash((parent, first, beginning)) in self._blocks for beginning in beginnings)

    def had_snapshot(self, path: Sequence[BlockPart], behind: int) -> bool:
        """Whether a snapshot after position `behind` of a path was evicted."""
        return any(behind < self._snapshots.get(part.block.digest, 0) <= part.end for part in path)

    def clear(self) -> None:
        self._blocks.clear()
        self._snapshots.clear()


def _bound(memory: dict[Any, Any]) -> None:
    if len(memory) > FORGOTTEN_MAX:
        del memory[next(iter(memory))]
