"""Items of a prefix index: blocks of KV columns and snapshots of recurrent states.

A prompt is a tuple of keys below 2**64: token ids, or in place of an image keys made from the hash of its
content (`ImageInput.keys`). Prompts are equal up to a position if their keys are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_DIGEST_BYTES = 20
_ITEM_BYTES = 1000
_KEY_BYTES = 40
"""Approximate memory in bytes of an item and of each of its keys, without the payload."""


@dataclass(eq=False, slots=True)
class Item:
    """A stored item, changed by the index only. `digest`: names its file. `payload`: opaque engine data; None
    if not in memory.

    `nbytes`: its memory, 0 if the payload is not loaded; `disk_bytes`: the size of its file, 0 if none.
    `holds`: reference count, including those of its descendants. `is_shared`: prompts diverge behind it.
    `is_fresh`: read from disk and not used since. `uses`: number of requests that reused it; `used_at`: time
    of the last lookup; `worth`: see `eviction`.
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
