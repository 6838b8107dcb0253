"""Metadata in the files of items, and reconstruction of the tree from it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from worker.prefixes.items import Block, Item, Snapshot, block_behind, root_of, snapshot_behind
from worker.prefixes.tree import Tree


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
