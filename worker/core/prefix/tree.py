"""Radix tree of stored prefixes: blocks of KV columns and snapshots of recurrent states, one root per salt.

A prompt is a tuple of keys below 2**64: token ids, or in place of an image keys made from the hash of its
content (`ImageInput.keys`). Prompts are equal up to a position if their keys are. The tree does not know in
which tier items are stored.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from worker.common_prefix import common_prefix_length

_DIGEST_BYTES = 20
"""Bytes of a digest, which names a file: no two of 2**60 items are expected to share one."""
_ITEM_BYTES = 1000
_KEY_BYTES = 40
"""Approximate memory in bytes of an item and of each of its keys, without the payload."""


@dataclass(eq=False, slots=True)
class Item:
    """A stored item, changed by the index only. `digest`: names its file. `payload`: opaque engine data; None
    if not in memory.

    `nbytes`: its memory, 0 if the payload is not loaded; `disk_bytes`: the size of its file, 0 if none.
    `holds`: reference count, including those of its descendants. `is_shared`: prompts diverge behind it.
    `is_fresh`: read from disk and not used since. `left_disk`: its file was removed for want of space.
    `uses`: number of requests that reused it; `used_at`: time of the last lookup; `worth`: see `eviction`.
    """

    digest: str
    parent: Block | None
    payload: object | None = None
    nbytes: int = 0
    disk_bytes: int = 0
    holds: int = 0
    is_pinned: bool = False
    is_shared: bool = False
    is_fresh: bool = False
    left_disk: bool = False
    uses: int = 0
    used_at: int = 0
    worth: int = 0

    @property
    def position(self) -> int:
        """Position in the prompt; descendants have higher ones."""
        raise NotImplementedError


@dataclass(eq=False, slots=True, kw_only=True)
class Block(Item):
    """KV columns of positions `first` to `last` (exclusive) for `keys`, which follow `parent` up to `first`.

    Sliding-window layers have columns from `window_from` on only. A root has neither keys nor a parent.
    """

    salt: str
    keys: tuple[int, ...] = ()
    first: int = 0
    last: int = 0
    window_from: int = 0
    children: dict[int, dict[int, Block]] = field(default_factory=dict)
    """Children by their first position and their first key."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """Snapshots by position: after `first`, up to `last`."""

    @property
    def position(self) -> int:
        return self.first


@dataclass(eq=False, slots=True, kw_only=True)
class Snapshot(Item):
    """Recurrent states after the first `at` positions of a path through `parent`. `is_superseded`: a later
    snapshot of the same prompt is stored."""

    at: int
    is_superseded: bool = False

    @property
    def position(self) -> int:
        return self.at


class BlockPart(NamedTuple):
    """The first `tokens` positions of a block."""

    block: Block
    tokens: int

    @property
    def end(self) -> int:
        return self.block.first + self.tokens


def root_of(salt: str) -> Block:
    """Return a new root for the prefixes with this salt."""
    return Block(_digest("root", salt), None, salt=salt)


def block_behind(parent: Block, keys: tuple[int, ...], first: int, window_from: int) -> Block:
    """Return a block with `parent` as its parent, not attached and without payload."""
    digest = _digest("block", parent.digest, f"{first} {window_from}", array("Q", keys).tobytes())
    last = first + len(keys)
    return Block(digest, parent, salt=parent.salt, keys=keys, first=first, last=last, window_from=window_from)


def snapshot_behind(parent: Block, at: int) -> Snapshot:
    """Return a snapshot with `parent` as its parent, not attached and without payload."""
    return Snapshot(_digest("snapshot", parent.digest, str(at)), parent, at=at)


def salt_of(item: Item) -> str:
    """Return the salt of the prompts that an item belongs to."""
    block = item if isinstance(item, Block) else item.parent
    assert block is not None, "only a root has no parent"
    return block.salt


def memory_of(item: Item, payload_bytes: int) -> int:
    """Return the memory of an item in bytes."""
    keys = len(item.keys) if isinstance(item, Block) else 0
    return payload_bytes + _ITEM_BYTES + _KEY_BYTES * keys


def path_to(item: Item) -> Iterator[BlockPart]:
    """Iterate over the ancestors of an item, the nearest first, without the root."""
    end, block = item.position, item.parent
    while block is not None and block.parent is not None:
        yield BlockPart(block, end - block.first)
        end, block = block.first, block.parent


def subtree_of(item: Item) -> Iterator[Item]:
    """Iterate over an item and its descendants, parents before children."""
    waiting = [item]
    while waiting:
        found = waiting.pop()
        yield found
        if isinstance(found, Block):
            waiting += found.snapshots.values()
            waiting += (child for siblings in found.children.values() for child in siblings.values())


def _digest(*parts: str | bytes) -> str:
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


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
