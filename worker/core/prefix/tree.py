"""Radix tree of stored prefixes, one root per salt. It does not know in which tier items are stored."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from worker.common_prefix import common_prefix_length
from worker.core.prefix.items import (
    Block,
    BlockPart,
    Item,
    Snapshot,
    block_behind,
    path_to,
    root_of,
    snapshot_behind,
    subtree_of,
)


class Tree:
    """Tree of blocks and snapshots.

    Blocks are never split: a prompt that diverges inside a block gets a child there. Invariant: at each
    position, a block and its children there continue with different keys, so each prompt has one path.
    """

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        """All blocks and snapshots, by digest."""
        self._roots: dict[str, Block] = {}
        """Roots that have children, by salt."""

    def __contains__(self, item: Item) -> bool:
        return self.items.get(item.digest) is item

    def root(self, salt: str) -> Block:
        """Return the root of a salt; a new one if nothing is stored for it."""
        return self._roots.get(salt) or root_of(salt)

    def walk(self, keys: tuple[int, ...], salt: str, end: int) -> tuple[list[BlockPart], int]:
        """Return the path of blocks with a prompt's keys from the start to at most `end`, and its end."""
        path: list[BlockPart] = []
        block, at, end = self.root(salt), 0, min(end, len(keys))
        while at < end:
            child = block.children.get(at, {}).get(keys[at])
            if child is None:
                break
            path.append(BlockPart(child, common_prefix_length(child.keys[: end - at], keys, at)))
            block, at = child, path[-1].end
        return path, at

    def add_block(self, block: Block) -> bool:
        """Attach a block to its parent. False: its position is occupied, or does not exist."""
        parent, first = block.parent, block.first
        if parent is None or not _has_room(parent, block):
            return False
        self._roots.setdefault(parent.salt, parent)
        siblings = parent.children.setdefault(first, {})
        is_fork = first < parent.last or len(siblings) > 0
        siblings[block.keys[0]] = block
        self.items[block.digest] = block
        if is_fork:
            for part in path_to(block):
                for item in (part.block, *snapshots_of(part)):
                    item.is_shared = True
        return True

    def add_snapshot(self, snapshot: Snapshot) -> Snapshot | None:
        """Attach a snapshot to its block, which has none there. Returns the snapshot that it supersedes."""
        block, at = snapshot.parent, snapshot.at
        assert block is not None, "a root has no states"
        earlier = _snapshot_before(snapshot)
        block.snapshots[at] = snapshot
        self.items[snapshot.digest] = snapshot
        behind = [child for first, group in block.children.items() if first >= at for child in group.values()]
        snapshot.is_shared = len(behind) > 1 or any(c.first < block.last or c.is_shared for c in behind)
        if earlier is not None:
            earlier.is_superseded = True
        return earlier

    def remove(self, item: Item) -> list[Item]:
        """Detach an item and its descendants. Returns them, `item` first."""
        parent = item.parent
        assert parent is not None, "a root is not stored"
        if isinstance(item, Block):
            siblings = parent.children[item.first]
            del siblings[item.keys[0]]
            if not siblings:
                del parent.children[item.first]
        else:
            del parent.snapshots[item.position]
        earlier = _snapshot_before(item)
        if earlier is not None and not (isinstance(item, Snapshot) and item.is_superseded):
            earlier.is_superseded = False
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        gone = list(subtree_of(item))
        for each in gone:
            del self.items[each.digest]
            if isinstance(each, Block):  # break cycles, so that memory is freed now
                each.children.clear()
                each.snapshots.clear()
        return gone


def snapshots_of(part: BlockPart) -> Iterable[Snapshot]:
    """Return the snapshots within a part of a block."""
    return (snapshot for at, snapshot in part.block.snapshots.items() if at <= part.end)


def _snapshot_before(item: Item) -> Snapshot | None:
    """Return the last snapshot on the path to an item."""
    for part in path_to(item):
        found = [snapshot for snapshot in snapshots_of(part) if snapshot is not item]
        if found:
            return max(found, key=lambda snapshot: snapshot.at)
    return None


def _has_room(parent: Block, block: Block) -> bool:
    first, inside = block.first, block.first - parent.first
    return (
        len(block.keys) > 0
        and first <= block.window_from <= block.last
        and (first == parent.last or (0 < inside < len(parent.keys) and parent.keys[inside] != block.keys[0]))
        and block.keys[0] not in parent.children.get(first, {})
    )


class StoredFile(Protocol):
    """An existing file: its digest, the metadata that `describe` returned, and its size."""

    @property
    def digest(self) -> str: ...
    @property
    def about(self) -> Mapping[str, Any]: ...
    @property
    def file_bytes(self) -> int: ...


class BlockMetadata(Struct, frozen=True, tag="block", tag_field="kind"):
    """Metadata of a block. `parent`, here and below: a digest."""

    parent: str
    salt: str
    first: int
    window_from: int
    keys: tuple[int, ...]


class SnapshotMetadata(Struct, frozen=True, tag="snapshot", tag_field="kind"):
    """Metadata of a snapshot. The digest of its parent block identifies the path."""

    parent: str
    at: int


About = BlockMetadata | SnapshotMetadata


def describe(item: Item) -> dict[str, Any]:
    """Return the metadata that restores an item's place in the tree, as JSON types."""
    assert item.parent is not None, "a root is not stored"
    about: About
    if isinstance(item, Block):
        about = BlockMetadata(item.parent.digest, item.salt, item.first, item.window_from, item.keys)
    else:
        about = SnapshotMetadata(item.parent.digest, item.position)
    return dict(msgspec.to_builtins(about))


def rebuild(tree: Tree, found: Iterable[StoredFile]) -> tuple[list[tuple[Item, int]], list[str]]:
    """Attach the items of files, given in any order, to an empty tree.

    Returns the items with their file sizes, and the digests of orphans, whose parent is missing or whose
    metadata does not match their digest.
    """
    below: dict[str, list[tuple[About, StoredFile]]] = defaultdict(list)
    orphans: list[str] = []
    for file in found:
        try:
            about = msgspec.convert(file.about, type=About)
        except msgspec.ValidationError:
            orphans.append(file.digest)
        else:
            below[about.parent].append((about, file))
    salts = {about.salt for files in below.values() for about, _ in files if isinstance(about, BlockMetadata)}
    parents = deque(root_of(salt) for salt in salts)
    attached: list[tuple[Item, int]] = []
    while parents:
        parent = parents.popleft()
        for about, file in sorted(below.pop(parent.digest, []), key=_order):
            item = _attach(tree, parent, about, file.digest)
            if item is None:
                orphans.append(file.digest)
                continue
            attached.append((item, file.file_bytes))
            if isinstance(item, Block):
                parents.append(item)
    return attached, orphans + [file.digest for files in below.values() for _, file in files]


def _order(entry: tuple[About, StoredFile]) -> tuple[bool, int]:
    """Sort key: blocks first, the longest before others at its position; then snapshots by position."""
    about, _ = entry
    return (False, -len(about.keys)) if isinstance(about, BlockMetadata) else (True, about.at)


def _attach(tree: Tree, parent: Block, about: About, digest: str) -> Item | None:
    try:
        item = _made_of(about, parent)
    except OverflowError:  # numbers out of the range of keys
        return None
    if item.digest != digest or digest in tree.items:
        return None
    if isinstance(item, Block):
        return item if tree.add_block(item) else None
    if not parent.first < item.position <= parent.last:
        return None
    tree.add_snapshot(item)
    return item


def _made_of(about: About, parent: Block) -> Block | Snapshot:
    if isinstance(about, BlockMetadata):
        return block_behind(parent, about.keys, about.first, about.window_from)
    return snapshot_behind(parent, about.at)
