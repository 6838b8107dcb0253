"""What a prefix index is made of: blocks of columns and snapshots of states, and how they are described.

A prompt is a tuple of keys, each below 2**64: the id of a token, or, where an image stands, one
made of the hash of its content (`Picture.keys`). Prompts are the same up to a position if their keys are.
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
"""What an item and each of its keys take in memory, roughly, beside the payload."""


@dataclass(eq=False, slots=True)
class Item:
    """Something stored. `digest` names its file; `payload`, the engine's own, is None where it is not in
    memory. Changed by the index only.

    `nbytes`: what it takes in memory, 0 where its payload is not there; `disk_bytes` likewise for its file.
    `holds`: by how many it, or what hangs on it, is held. `is_shared`: prompts part behind it. `is_fresh`:
    read from the disk and not used since. `uses`: requests that began with it; `used_at`: when it was last
    asked for; `worth`: see `eviction`.
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
        """What hangs on an item has a higher one."""
        raise NotImplementedError


@dataclass(eq=False, slots=True, kw_only=True)
class Block(Item):
    """The columns of positions `first` to before `last` with these `keys`, behind those of `parent` up to
    `first`. Sliding layers have theirs from `window_from` on. A root has neither keys nor a parent."""

    salt: str
    keys: tuple[int, ...] = ()
    first: int = 0
    last: int = 0
    window_from: int = 0
    children: dict[int, dict[int, Block]] = field(default_factory=dict)
    """By where they begin and by their first key."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """By position: behind `first`, up to `last`."""

    @property
    def position(self) -> int:
        return self.first


@dataclass(eq=False, slots=True, kw_only=True)
class Snapshot(Item):
    """The states behind the first `at` positions of a path through `parent`. `is_superseded`: a later one
    has been stored of the same prompt."""

    at: int
    is_superseded: bool = False

    @property
    def position(self) -> int:
        return self.at


class Part(NamedTuple):
    """The first `tokens` positions of a block."""

    block: Block
    tokens: int

    @property
    def end(self) -> int:
        return self.block.first + self.tokens


def root_of(salt: str) -> Block:
    """The root of the prefixes with this salt."""
    return Block(_digest("root", salt), None, salt=salt)


def block_behind(parent: Block, keys: tuple[int, ...], first: int, window_from: int) -> Block:
    """A block as it would hang on `parent`; not attached, nothing in it."""
    digest = _digest("block", parent.digest, f"{first} {window_from}", array("Q", keys).tobytes())
    last = first + len(keys)
    return Block(digest, parent, salt=parent.salt, keys=keys, first=first, last=last, window_from=window_from)


def snapshot_behind(parent: Block, at: int) -> Snapshot:
    """A snapshot as it would hang on `parent`; not attached, nothing in it."""
    return Snapshot(_digest("snapshot", parent.digest, str(at)), parent, at=at)


def memory_of(item: Item, payload_bytes: int) -> int:
    """Bytes that an item takes in memory."""
    keys = len(item.keys) if isinstance(item, Block) else 0
    return payload_bytes + _ITEM_BYTES + _KEY_BYTES * keys


def path_to(item: Item) -> Iterator[Part]:
    """What an item hangs on, the nearest first, without the root."""
    end, block = item.position, item.parent
    while block is not None and block.parent is not None:
        yield Part(block, end - block.first)
        end, block = block.first, block.parent


def subtree_of(item: Item) -> Iterator[Item]:
    """An item and all that hangs on it; an item comes after what it hangs on."""
    waiting = [item]
    while waiting:
        found = waiting.pop()
        yield found
        if isinstance(found, Block):
            waiting += found.snapshots.values()
            waiting += (child for siblings in found.children.values() for child in siblings.values())


def common_length(keys: tuple[int, ...], prompt: tuple[int, ...], first: int, end: int) -> int:
    """How many of `keys` are those of `prompt[first:end]`. Slices are compared, not keys one by one."""
    high = min(len(keys), end - first)
    if keys[:high] == prompt[first : first + high]:
        return high
    low, high = 0, high - 1
    while low < high:
        middle = (low + high + 1) // 2
        if keys[low:middle] == prompt[first + low : first + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _digest(*parts: str | bytes) -> str:
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()
