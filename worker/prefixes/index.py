"""Which prefixes are stored, how long a prompt can begin with them, and what is forgotten. Pure.

What must always hold: every item of the tree has a payload in memory, a file on the disk, or both; what an
item hangs on is there as long as the item; `ram_bytes` and `disk_bytes` are the sums over all items.

The model thread owns it. It decides and counts; payloads are moved and files written by others, who say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protocol.parts import PrefixStatus
from worker.contract import Shape
from worker.prefixes import descriptions
from worker.prefixes.descriptions import Found
from worker.prefixes.eviction import Forgotten, Tier, is_superseded, worth
from worker.prefixes.items import Block, Item, Snapshot, block_behind, memory_of, path_to, snapshot_behind
from worker.prefixes.lookups import Lookups
from worker.prefixes.matching import Match, longest, match_of, why_not_longer
from worker.prefixes.tree import Tree, snapshots_of

__all__ = ["Block", "Item", "Match", "PrefixIndex", "Snapshot"]


class PrefixIndex:
    """What is stored of a model whose rows need `shape` to go on. `version` changes with what is found."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.version = 0
        self._tree = Tree()
        self._ram, self._disk = Tier("nbytes"), Tier("disk_bytes")
        self._unwanted: dict[str, Item] = {}
        """Items whose files nobody has been told to remove."""
        self._forgotten = Forgotten()
        self._lookups = Lookups()
        self._now = 0
        self._age = 0

    @property
    def ram_bytes(self) -> int:
        """Of payloads, and of what the index itself takes for them."""
        return self._ram.bytes

    @property
    def disk_bytes(self) -> int:
        return self._disk.bytes

    # --- asking ---

    def find(self, keys: tuple[int, ...], *, salt: str = "", limit: int, ram_only: bool = False) -> Match:
        """The longest beginning of a prompt, up to `limit`, with which a row can begin.

        Whatever it uses is known to be wanted. `miss`: `empty`: nothing has this salt; `diverged_at_N`: no
        block has the key at position N; `media_differs`: nor is it of the same image; `evicted`: something
        longer was there once; `no_snapshot`, `no_window`: blocks have more of the keys, but a state or the
        columns of a sliding window are not there; `not_in_ram`: they are on the disk.
        """
        limit = min(limit, len(keys))
        path, _ = self._tree.walk(keys, salt, limit)
        length, snapshot = longest(path, self.shape, ram_only=ram_only)
        miss = ""
        if ram_only and longest(path, self.shape)[0] > length:
            miss = "not_in_ram"
        elif length < limit:
            root = self._tree.root(salt)
            miss = why_not_longer(keys, path, length, root, self.shape, self._forgotten)
        match = match_of(path, length, snapshot, miss)
        self._touch(match.items)
        return match

    def count(self, match: Match | None, *, prompt_tokens: int, miss: str) -> None:
        """A request has begun, with `match` or nothing stored; `miss`: what it was told of the rest."""
        match = match or Match()
        for item in match.items:
            item.uses += 1
            item.is_fresh = False
        self._touch(match.items)
        self._lookups.add(match, prompt_tokens, miss)

    def reach(self, keys: tuple[int, ...], *, salt: str = "", end: int) -> tuple[int, bool]:
        """Up to which position, at most `end`, blocks have the keys, and whether `end` has a snapshot."""
        path, known = self._tree.walk(keys, salt, end)
        return known, known == end and bool(path) and end in path[-1].block.snapshots

    def status(self, *, ram_limit: int = 0, disk_limit: int = 0) -> PrefixStatus:
        """Sizes, counts since the start, and the prefixes used most."""
        snapshots = sum(isinstance(item, Snapshot) for item in self._tree.items.values())
        return PrefixStatus(
            ram_bytes=self.ram_bytes,
            ram_limit=ram_limit,
            disk_bytes=self.disk_bytes,
            disk_limit=disk_limit,
            blocks=len(self._tree.items) - snapshots,
            snapshots=snapshots,
            lookups=self._lookups.count,
            hits=self._lookups.hits,
            prompt_tokens=self._lookups.prompt_tokens,
            reused_tokens=self._lookups.reused_tokens,
            misses=dict(self._lookups.misses),
            top=self._lookups.top(),
        )

    # --- storing ---

    def add(
        self,
        keys: tuple[int, ...],
        first: int,
        last: int,
        payload: object,
        nbytes: int,
        *,
        salt: str = "",
        window_from: int = 0,
    ) -> Block:
        """The columns of `keys[first:last]`, behind what is stored up to `first`; those of sliding layers
        from `window_from` on.

        What is known is kept: then its last block is returned, with the payload if it is this block and has
        none in memory. Raises `ValueError` if nothing is stored up to `first`, or only a part of the run.
        """
        path, known = self._tree.walk(keys, salt, last)
        if not first < last <= len(keys) or known < first or first < known < last:
            raise ValueError(f"positions {first} to {last} do not go on from what is stored up to {known}")
        window_from = min(max(first, window_from), last) if self.shape.window else first
        if known == last:
            block = path[-1].block
            if (block.first, block.last) == (first, last) and window_from <= block.window_from:
                self._fill(block, payload, nbytes)
        else:
            parent = path[-1].block if path else self._tree.root(salt)
            block = block_behind(parent, keys[first:last], first, window_from)
            attached = self._tree.add_block(block)
            assert attached, "the walk ended here"
            self._fill(block, payload, nbytes)
        self._touch((*(part.block for part in path), block))
        return block

    def add_snapshot(
        self, keys: tuple[int, ...], at: int, payload: object, nbytes: int, *, salt: str = ""
    ) -> Snapshot:
        """The states behind `keys[:at]`. Raises `ValueError` if nothing is stored up to there."""
        path, known = self._tree.walk(keys, salt, at)
        if not 0 < at == known:
            raise ValueError(f"there is no position {at} behind what is stored up to {known}")
        parent = path[-1].block
        snapshot = parent.snapshots.get(at)
        if snapshot is None:
            snapshot = snapshot_behind(parent, at)
            self._attach_snapshot(snapshot)
        self._fill(snapshot, payload, nbytes)
        self._touch((*(part.block for part in path), snapshot))
        return snapshot

    def pin(self, keys: tuple[int, ...], *, salt: str = "", last: int) -> None:
        """What is stored of `keys[:last]` is the last to be forgotten."""
        for part in self._tree.walk(keys, salt, last)[0]:
            for item in (part.block, *snapshots_of(part)):
                item.is_pinned = True

    def hold(self, items: Iterable[Item]) -> None:
        """Keep items, and what they hang on, until they are released as often as they were held."""
        self._hold(items, 1)

    def release(self, items: Iterable[Item]) -> None:
        """See `hold`. Of items that are gone as well."""
        self._hold(items, -1)

    # --- memory and disk ---

    def shrink_ram(self, limit: int) -> list[Item]:
        """Have no more than `limit` bytes in memory. The items that are not there any more: those that have
        no file are forgotten, with what hangs on them."""
        gone: list[Item] = []
        for item in self._ram.excess(limit):
            self._grow_old(item)
            if item.disk_bytes:
                item.payload = None
                self._ram.take(item)
                gone.append(item)
            else:
                gone += self._remove(item)
        self.version += bool(gone)
        return gone

    def shrink_disk(self, limit: int) -> list[Item]:
        """Have no more than `limit` bytes on the disk. The items whose files must go; of those too that were
        forgotten since the last call."""
        for item in self._disk.excess(limit):
            self._grow_old(item)
            if item.payload is None:
                self._remove(item)
            else:
                self._unwanted[item.digest] = item
                self._disk.take(item)
        self.version += bool(self._unwanted)
        unwanted, self._unwanted = self._unwanted, {}
        return list(unwanted.values())

    def to_disk(self, item: Item, file_bytes: int) -> bool:
        """The file of an item has been written. False: it is not wanted any more."""
        current = self._tree.items.get(item.digest)
        if current is None:
            return False
        self._disk.take(current)
        self._disk.put(current, file_bytes)
        self._unwanted.pop(item.digest, None)
        return True

    def loaded(self, item: Item, payload: object, nbytes: int) -> None:
        """The file of an item has been read. One that was forgotten meanwhile remains so."""
        current = self._tree.items.get(item.digest)
        if current is not None:
            self._fill(current, payload, nbytes, is_fresh=True)

    def lost(self, item: Item) -> None:
        """Its file or its payload is no good: forget it and all that hangs on it, held or not."""
        if item in self._tree:
            self._remove(item)
            self.version += 1

    def describe(self, item: Item) -> dict[str, Any]:
        """What its file must say for `restore_from_disk`, as JSON can hold it."""
        return descriptions.describe(item)

    def restore_from_disk(self, found: Iterable[Found]) -> list[str]:
        """Take note of files, in any order, before anything is stored. The digests of those that have no
        place: what they hang on is missing, or they are not what they say."""
        assert not self._tree.items, "files are looked for once, at the start"
        attached, orphans = descriptions.rebuild(self._tree, found)
        for item, file_bytes in attached:
            self._disk.put(item, file_bytes)
        self.version += 1
        return orphans

    def clear(self) -> list[Item]:
        """Forget all that is not held. The items, whether they had files or not."""
        gone = list(self._unwanted.values())
        for item in list(self._tree.items.values()):
            if item in self._tree and not item.holds:
                gone += self._remove(item)
        self._unwanted.clear()
        self._forgotten.clear()
        self.version += 1
        return gone

    # --- within ---

    def _touch(self, items: Iterable[Item]) -> None:
        self._now += 1
        for item in items:
            item.used_at = self._now
            item.worth = max(item.worth, self._age + worth(item))

    def _grow_old(self, item: Item) -> None:
        if not is_superseded(item):
            self._age = max(self._age, item.worth)

    def _hold(self, items: Iterable[Item], times: int) -> None:
        for item in items:
            for each in (item, *(block for block, _ in path_to(item))):
                each.holds += times
                assert each.holds >= 0, each.digest

    def _fill(self, item: Item, payload: object, nbytes: int, *, is_fresh: bool = False) -> None:
        if item.payload is None:
            item.payload, item.is_fresh = payload, is_fresh
            self._ram.put(item, memory_of(item, nbytes))
            self.version += 1

    def _attach_snapshot(self, snapshot: Snapshot) -> None:
        superseded = self._tree.add_snapshot(snapshot)
        for tier in (self._ram, self._disk):
            if superseded is not None and tier.has(superseded):
                tier.push(superseded)

    def _remove(self, item: Item) -> list[Item]:
        """Forget an item with all that hangs on it: the items."""
        self._forgotten.add(item)
        gone = self._tree.remove(item)
        for each in gone:
            each.payload = None
            self._ram.take(each)
            if each.disk_bytes:
                self._unwanted[each.digest] = each
                self._disk.take(each)
            if isinstance(each, Block):
                self._lookups.forget(each)
        return gone
