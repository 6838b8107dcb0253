"""What is forgotten first, and what was.

Each item has a worth, and what is worth least goes first; of equals, what was last asked for longest ago.
What is asked for again is worth `age` and a little more, the more useful it has been, and `age` grows with
what goes: nothing stays for what it was once (GreedyDual, N. Young 1994). Before all others go snapshots that
a later one has taken the place of, after all others what is pinned. What is asked for, is used, shared,
pinned or held together with all that it hangs on. So nothing is worth less than what hangs on it, and leaves
go first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from worker.prefixes.items import Block, Item, Part, Snapshot

FORGOTTEN_MAX = 4096
_BEGINNING = 16
_SPARE_ENTRIES = 64

Rank = tuple[bool, bool, int, int, int]


def worth(item: Item) -> int:
    """Beyond `age`, when it is asked for."""
    return 1 + (item.uses > 0) + 2 * item.is_shared


def rank(item: Item) -> Rank:
    """The lowest goes first."""
    return (item.is_pinned, not is_superseded(item), item.worth, item.used_at, -item.position)


def is_superseded(item: Item) -> bool:
    """Whether it is a snapshot that only a prompt would want that parts from all that are known."""
    return isinstance(item, Snapshot) and item.is_superseded and not item.is_shared


class Tier:
    """The items that are in one place, and what they take there in all: `bytes`.

    Ranks change while items are in the queue, mostly upwards. An entry that proves too low goes back in with
    the right rank when its turn comes; `push` tells of a lower one. Entries of items that are gone are
    passed over, and swept out when they are many.
    """

    def __init__(self, size: Literal["nbytes", "disk_bytes"]) -> None:
        """`size`: the attribute that says what an item takes here, 0 where it is not here."""
        self.bytes = 0
        self._size = size
        self._count = 0
        self._queue: list[tuple[Rank, int, Item]] = []
        self._numbers = itertools.count()

    def has(self, item: Item) -> bool:
        return bool(getattr(item, self._size))

    def put(self, item: Item, size: int) -> None:
        """An item that is not here comes. `size` is at least 1."""
        assert size > 0, size
        assert not self.has(item), item.digest
        setattr(item, self._size, size)
        self.bytes += size
        self._count += 1
        self.push(item)

    def take(self, item: Item) -> None:
        """An item goes. One that is not here is no error."""
        self._count -= self.has(item)
        self.bytes -= getattr(item, self._size)
        setattr(item, self._size, 0)

    def push(self, item: Item) -> None:
        """Say that the rank of an item has become lower."""
        if len(self._queue) > 2 * self._count + _SPARE_ENTRIES:
            there = dict.fromkeys(item for _, _, item in self._queue if self.has(item))
            self._queue = [(rank(item), next(self._numbers), item) for item in there]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (rank(item), next(self._numbers), item))

    def excess(self, limit: int) -> Iterator[Item]:
        """What has to go, one by one, until no more than `limit` bytes are left or only held items.

        Each must be taken away before the next is asked for.
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


class Forgotten:
    """The last few thousand items that went, remembered by numbers, to tell what was known from what never
    was. A rare mistake spoils a report and nothing else."""

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
        """Whether one hung on `parent` that began at `first` as `keys` go on."""
        beginnings = (keys[first : first + count] for count in range(1, _BEGINNING + 1))
        return any(hash((parent, first, beginning)) in self._blocks for beginning in beginnings)

    def had_snapshot(self, path: Sequence[Part], behind: int) -> bool:
        """Whether there was one behind position `behind` of a path."""
        return any(behind < self._snapshots.get(part.block.digest, 0) <= part.end for part in path)

    def clear(self) -> None:
        self._blocks.clear()
        self._snapshots.clear()


def _bound(memory: dict[Any, Any]) -> None:
    if len(memory) > FORGOTTEN_MAX:
        del memory[next(iter(memory))]
