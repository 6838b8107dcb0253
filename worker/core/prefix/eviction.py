"""Eviction policy of the prefix cache (GreedyDual, N. Young 1994).

The item with the lowest worth is evicted first; among equals, the least recently used one. A lookup sets an
item's worth to `age` plus a bonus for past usefulness, and `age` rises to the worth of evicted items, so old
usefulness expires. Superseded snapshots go before all others, pinned items after all others. Lookups, uses,
sharing, pins and holds apply to all ancestors too, so no item is worth less than its descendants, and leaves
go first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from worker.core.prefix.tree import Item, Snapshot

_SPARE_ENTRIES = 64
"""Entries that a queue may have beyond two for each item before it is built anew."""

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

    def among(self, limit: int, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over those of `items` that are in this tier, until at most `limit` bytes remain."""
        return (item for item in items if self.bytes > limit and self.has(item))

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
