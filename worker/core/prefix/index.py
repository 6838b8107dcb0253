"""Prefix index: which prefixes are stored, how much of a prompt they match, and what is evicted. Pure.

Invariants: every item of the tree has a payload in memory, a file on disk, or both; an item's ancestors exist
as long as the item; `ram_bytes` and `disk_bytes` are the sums over all items.

It belongs to the model thread. The index decides and counts; its callers move payloads, write files, and
report both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from protocol.prefix_namespace import contains
from protocol.types import PrefixStatus
from worker.core.prefix import tree
from worker.core.prefix.eviction import Tier, is_superseded, worth
from worker.core.prefix.tree import (
    Block,
    BlockPart,
    Item,
    Snapshot,
    StoredFile,
    Tree,
    block_behind,
    memory_of,
    path_to,
    salt_of,
    snapshot_behind,
    snapshots_of,
)
from worker.values import CacheSlice, CacheSpec

Place = Literal["none", "ram", "disk"]


@dataclass(frozen=True, slots=True)
class Match:
    """Stored prefix of a prompt: `length` keys as `pieces` from position 0 on, and the `snapshot` at its end
    if the model has states.

    `known`: number of keys that blocks hold. `miss`: why the match is not longer. `items`: all items used;
    `missing`: those not in memory. `tier`: `disk` if any is missing, or was loaded and not used since.
    """

    length: int = 0
    pieces: tuple[BlockPart, ...] = ()
    snapshot: Snapshot | None = None
    known: int = 0
    miss: str = ""
    items: tuple[Item, ...] = ()
    missing: tuple[Item, ...] = ()
    tier: Place = "none"


def match_of(path: Sequence[BlockPart], length: int, snapshot: Snapshot | None, miss: str) -> Match:
    """Return the match of the first `length` positions of a path."""
    pieces = tuple(
        BlockPart(block, min(tokens, length - block.first)) for block, tokens in path if block.first < length
    )
    items = (*(block for block, _ in pieces), *([snapshot] if snapshot else []))
    missing = tuple(item for item in items if item.payload is None)
    tier: Place = "disk" if missing or any(item.is_fresh for item in items) else "ram"
    known = path[-1].end if path else 0
    return Match(length, pieces, snapshot, known, miss, items, missing, tier if length else "none")


def longest(
    path: Sequence[BlockPart], shape: CacheSpec, *, ram_only: bool = False
) -> tuple[int, Snapshot | None]:
    """Return the last position on a path at which every layer can be restored (0: none), and its snapshot."""
    end = path[-1].end if path else 0
    if ram_only:
        end = next((part.block.first for part in path if part.block.payload is None), end)
    gaps = _gaps(path, shape.window)
    end = _settle(end, gaps)
    if not shape.has_states:
        return end, None
    for part in reversed(path):
        for snapshot in sorted(snapshots_of(part), key=lambda snapshot: -snapshot.at):
            at = snapshot.at
            if at <= end and _settle(at, gaps) == at and not (ram_only and snapshot.payload is None):
                return at, snapshot
    return 0, None


def _gaps(path: Iterable[BlockPart], window: int) -> list[tuple[int, int]]:
    """Return the intervals (exclusive) in which sliding-window layers cannot be restored."""
    return [
        (block.first, min(block.window_from, block.first + tokens) + window)
        for block, tokens in path
        if window and block.window_from > block.first
    ]


def _settle(position: int, gaps: Sequence[tuple[int, int]]) -> int:
    """Return the last position up to `position` that lies in no gap."""
    for begin, end in reversed(gaps):
        if begin < position < end:
            position = begin
    return position


DIVERGED = "diverged_at_"
"""Beginning of the miss reason of a prompt that no stored one continues."""
BLOCK_TOKENS = 512
"""Maximum length of a block, which is evicted as a whole."""


@dataclass(slots=True)
class LookupStats:
    """Hit and miss counts. `misses`: by reason, without positions."""

    count: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)

    def add(self, match: Match, prompt_tokens: int, miss: str) -> None:
        self.count += 1
        self.hits += match.length > 0
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += match.length
        if miss:
            self.misses[miss.partition("_at_")[0]] += 1


class PrefixIndex:
    """Prefix index of a model with the cache spec `shape`. `version` changes when lookups may differ."""

    def __init__(self, shape: CacheSpec) -> None:
        self.shape = shape
        self.version = 0
        self._tree = Tree()
        self._ram, self._disk = Tier("nbytes"), Tier("disk_bytes")
        self._unwanted: dict[str, Item] = {}
        """Items whose files are to be removed and were not yet returned by `shrink_disk`."""
        self._lookups = LookupStats()
        self._now = 0
        self._age = 0

    @property
    def ram_bytes(self) -> int:
        """Memory of payloads and of the index entries for them."""
        return self._ram.bytes

    @property
    def disk_bytes(self) -> int:
        return self._disk.bytes

    # --- lookup ---

    def find(self, keys: tuple[int, ...], *, salt: str = "", limit: int, ram_only: bool = False) -> Match:
        """Return the longest restorable prefix of a prompt, up to `limit`, and mark its items as used.

        Its `miss` is “diverged_at_N” if no block has the key at position N, or “incomplete” if blocks have
        more of the keys, but their payload is not in memory, or a state or the columns of a sliding window
        are missing.
        """
        limit = min(limit, len(keys))
        path, known = self._tree.walk(keys, salt, limit)
        length, snapshot = longest(path, self.shape, ram_only=ram_only)
        miss = "incomplete" if length < known else f"{DIVERGED}{known}" if known < limit else ""
        match = match_of(path, length, snapshot, miss)
        self._touch(match.items)
        return match

    def count(self, match: Match | None, *, prompt_tokens: int, miss: str) -> None:
        """Count a request that started with `match`, or without one. `miss`: the miss reason it was given."""
        match = match or Match()
        for item in match.items:
            item.uses += 1
            item.is_fresh = False
        self._touch(match.items)
        self._lookups.add(match, prompt_tokens, miss)

    def stored(self, keys: tuple[int, ...], *, salt: str = "") -> Iterator[Item]:
        """Iterate over what is stored of a prompt: each block, then the snapshots within it."""
        for part in self._tree.walk(keys, salt, len(keys))[0]:
            yield part.block
            yield from sorted(snapshots_of(part), key=lambda snapshot: snapshot.at)

    def reach(self, keys: tuple[int, ...], *, salt: str = "", end: int) -> tuple[int, bool]:
        """Return up to where blocks have the keys, at most `end`, and whether `end` has a snapshot."""
        path, known = self._tree.walk(keys, salt, end)
        return known, known == end and bool(path) and end in path[-1].block.snapshots

    def status(self, *, ram_limit: int = 0, disk_limit: int = 0) -> PrefixStatus:
        """Return sizes, and counts since the start."""
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
        """Store the KV columns of `keys[first:last]`; those of sliding-window layers from `window_from` on.

        If the keys are stored already, their last block is returned; if it is the same block without payload
        in memory, it gets this one. Raises `ValueError` if the stored prefix ends before `first` or within
        the run.
        """
        path, known = self._tree.walk(keys, salt, last)
        if not first < last <= len(keys) or known < first or first < known < last:
            raise ValueError(f"positions {first} to {last} do not continue the stored prefix of {known} keys")
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
        """Store the states after `keys[:at]`. Raises `ValueError` if the stored prefix ends before `at`."""
        path, known = self._tree.walk(keys, salt, at)
        if not 0 < at == known:
            raise ValueError(f"cannot add a snapshot at {at}: the stored prefix has {known} keys")
        parent = path[-1].block
        snapshot = parent.snapshots.get(at)
        if snapshot is None:
            snapshot = snapshot_behind(parent, at)
            self._attach_snapshot(snapshot)
        self._fill(snapshot, payload, nbytes)
        self._touch((*(part.block for part in path), snapshot))
        return snapshot

    def pin(self, keys: tuple[int, ...], *, salt: str = "", last: int) -> None:
        """Pin what is stored of `keys[:last]`: it is evicted last."""
        for part in self._tree.walk(keys, salt, last)[0]:
            for item in (part.block, *snapshots_of(part)):
                item.is_pinned = True

    def hold(self, items: Iterable[Item]) -> None:
        """Protect items and their ancestors from eviction until as many calls of `release`."""
        self._hold(items, 1)

    def release(self, items: Iterable[Item]) -> None:
        """Undo `hold`, also for items that were removed meanwhile."""
        self._hold(items, -1)

    # --- memory and disk ---

    def shrink_ram(self, limit: int, copied: Iterable[Item] = ()) -> list[Item]:
        """Shrink the memory tier to `limit` bytes. Returns the items dropped from memory. Those without a
        file are removed with their descendants. `copied`: the last items of prefixes that are elsewhere as
        well; they and those before them that no other prompt shares are evicted first."""
        gone: list[Item] = []
        if self._ram.bytes <= limit:
            return gone
        lonely = (
            item
            for last in copied
            for item in (last, *(block for block, _ in path_to(last)))
            if not (item.is_shared or item.holds or item.is_pinned)
        )
        for item in self._ram.among(limit, lonely):
            gone += self._unload(item)
        for item in self._ram.excess(limit):
            self._grow_old(item)
            gone += self._unload(item)
        self.version += bool(gone)
        return gone

    def shrink_disk(self, limit: int) -> list[Item]:
        """Shrink the disk tier to `limit` bytes. Returns the items whose files must be removed, including
        those removed since the last call."""
        for item in self._disk.excess(limit):
            self._grow_old(item)
            if item.payload is None:
                self._remove(item)
            else:
                self._unwanted[item.digest] = item
                self._disk.take(item)
                item.left_disk = True
        self.version += bool(self._unwanted)
        unwanted, self._unwanted = self._unwanted, {}
        return list(unwanted.values())

    def to_disk(self, item: Item, file_bytes: int) -> bool:
        """Record that an item's file was written. False: the item was removed meanwhile."""
        current = self._tree.items.get(item.digest)
        if current is None:
            return False
        self._disk.take(current)
        self._disk.put(current, file_bytes)
        self._unwanted.pop(item.digest, None)
        return True

    def loaded(self, item: Item, payload: object, nbytes: int) -> None:
        """Record that an item's file was read. An item removed meanwhile stays removed."""
        current = self._tree.items.get(item.digest)
        if current is not None:
            self._fill(current, payload, nbytes, is_fresh=True)

    def lost(self, item: Item) -> None:
        """Remove an item with an unusable file or payload, and its descendants, held or not."""
        if item in self._tree:
            self._remove(item)
            self.version += 1

    def describe(self, item: Item) -> dict[str, Any]:
        """Return the metadata in an item's file, for `restore_from_disk`, as JSON types."""
        return tree.describe(item)

    def restore_from_disk(self, found: Iterable[StoredFile]) -> list[str]:
        """Add the items of files, in any order, before anything is stored. Returns the digests of orphans,
        whose parent is missing or whose metadata does not match their digest."""
        assert not self._tree.items, "files are restored once, at the start"
        attached, orphans = tree.rebuild(self._tree, found)
        for item, file_bytes in attached:
            self._disk.put(item, file_bytes)
        self.version += 1
        return orphans

    def clear(self, namespace: str = "") -> list[Item]:
        """Remove the items of a namespace that are not held; the empty one is all. Returns them and what
        awaits the removal of its file."""
        gone = list(self._unwanted.values())
        for item in list(self._tree.items.values()):
            if item in self._tree and not item.holds and contains(namespace, salt_of(item)):
                gone += self._remove(item)
        self._unwanted.clear()
        self.version += 1
        return gone

    # --- internal ---

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

    def _unload(self, item: Item) -> list[Item]:
        """Drop an item from memory; without a file it is removed. Returns the items dropped."""
        if not item.disk_bytes:
            return self._remove(item)
        item.payload = None
        self._ram.take(item)
        return [item]

    def _remove(self, item: Item) -> list[Item]:
        """Remove an item and its descendants. Returns them."""
        gone = self._tree.remove(item)
        for each in gone:
            each.payload = None
            self._ram.take(each)
            if each.disk_bytes:
                self._unwanted[each.digest] = each
                self._disk.take(each)
        return gone


class CacheCopier(Protocol):
    """The part of `Engine` that copies row caches."""

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        """Copy slices of a row's KV columns, and its recurrent states."""


def keep(
    index: PrefixIndex,
    source: CacheCopier,
    row: str,
    tokens: tuple[int, ...],
    *,
    salt: str,
    block_tokens: int,
    states: bool = True,
) -> list[Item]:
    """Store the part of a row's cache that the index lacks, in blocks of at most `block_tokens`.

    `tokens`: exactly those in the row's cache. `states`: store a snapshot of recurrent states at their end as
    well, if needed. Raises what `source` raises.
    """
    end = len(tokens)
    known, has_snapshot = index.reach(tokens, salt=salt, end=end)
    states = states and index.shape.has_states and not has_snapshot
    if known == end and not states:
        return []
    runs = [(first, min(first + block_tokens, end)) for first in range(known, end, block_tokens)]
    cuts, state = source.copy_cache(row, runs, states=states)
    stored: list[Item] = []
    for (first, last), cut in zip(runs, cuts, strict=True):
        window_from = max(first, cut.complete_from)
        stored.append(
            index.add(tokens, first, last, cut.payload, cut.nbytes, salt=salt, window_from=window_from)
        )
    if state is not None:
        stored.append(index.add_snapshot(tokens, end, state.payload, state.nbytes, salt=salt))
    return stored
