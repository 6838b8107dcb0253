"""What the file of an item says of it, and the tree as it is rebuilt from files."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from worker.prefixes.items import Block, Item, Snapshot, block_behind, root_of, snapshot_behind
from worker.prefixes.tree import Tree


class Found(Protocol):
    """A file that is there: its name, what `describe` gave to be written into it, its size."""

    @property
    def digest(self) -> str: ...
    @property
    def about(self) -> Mapping[str, Any]: ...
    @property
    def file_bytes(self) -> int: ...


class AboutBlock(Struct, frozen=True, tag="block", tag_field="kind"):
    """`parent` is a digest, here and below."""

    parent: str
    salt: str
    first: int
    window_from: int
    keys: tuple[int, ...]


class AboutSnapshot(Struct, frozen=True, tag="snapshot", tag_field="kind"):
    """The digest of a path's last block says which path it is."""

    parent: str
    at: int


About = AboutBlock | AboutSnapshot


def describe(item: Item) -> dict[str, Any]:
    """What must be known to find the place of an item again, as JSON can hold it."""
    assert item.parent is not None, "a root is not stored"
    about: About
    if isinstance(item, Block):
        about = AboutBlock(item.parent.digest, item.salt, item.first, item.window_from, item.keys)
    else:
        about = AboutSnapshot(item.parent.digest, item.position)
    return dict(msgspec.to_builtins(about))


def rebuild(tree: Tree, found: Iterable[Found]) -> tuple[list[tuple[Item, int]], list[str]]:
    """Attach what files tell of, in any order, to an empty tree: the items with the sizes of their files, and
    the digests of files that have no place: what they hang on is missing, or they are not what they say."""
    below: dict[str, list[tuple[About, Found]]] = defaultdict(list)
    orphans: list[str] = []
    for file in found:
        try:
            about = msgspec.convert(file.about, type=About)
        except msgspec.ValidationError:
            orphans.append(file.digest)
        else:
            below[about.parent].append((about, file))
    salts = {about.salt for files in below.values() for about, _ in files if isinstance(about, AboutBlock)}
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


def _order(entry: tuple[About, Found]) -> tuple[bool, int]:
    """Blocks first, the longest before others that want its place; then snapshots, the earliest first."""
    about, _ = entry
    return (False, -len(about.keys)) if isinstance(about, AboutBlock) else (True, about.at)


def _attach(tree: Tree, parent: Block, about: About, digest: str) -> Item | None:
    try:
        item = _made_of(about, parent)
    except OverflowError:  # numbers that are no keys
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
    if isinstance(about, AboutBlock):
        return block_behind(parent, about.keys, about.first, about.window_from)
    return snapshot_behind(parent, about.at)
