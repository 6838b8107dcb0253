"""The prefix index: matches, reasons for misses, eviction order and reloads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from protocol.prefix_namespace import salt_in
from worker.core.prefix.index import Match, PrefixIndex
from worker.core.prefix.tree import Block, Item, memory_of, snapshot_behind
from worker.values import CacheSpec

Keys = tuple[int, ...]

DENSE = CacheSpec()
HYBRID = CacheSpec(has_states=True)
SLIDING = CacheSpec(window=4)
A = tuple(range(100, 140))
NBYTES = 10_000


@dataclass(frozen=True)
class File:
    digest: str
    about: dict[str, Any]
    file_bytes: int


def branch(keys: Keys, at: int, key: int, length: int | None = None) -> Keys:
    """Return a prompt that diverges from `keys` at position `at`, with its own `key` there."""
    length = len(keys) if length is None else length
    return (*keys[:at], *(key + n for n in range(length - at)))


def store(
    index: PrefixIndex, keys: Keys, last: int, *, size: int = 8, salt: str = "", window_from: int = 0
) -> list[Block]:
    """Store the unknown part of `keys[:last]` in blocks of `size` keys."""
    known, _ = index.reach(keys, salt=salt, end=last)
    return [
        index.add(keys, at, min(at + size, last), f"{at}", NBYTES, salt=salt, window_from=window_from)
        for at in range(known, last, size)
    ]


def found(index: PrefixIndex, keys: Keys, *, salt: str = "", ram_only: bool = False) -> tuple[int, str]:
    match = index.find(keys, salt=salt, limit=len(keys), ram_only=ram_only)
    assert sum(tokens for _, tokens in match.pieces) == match.length
    at = 0
    for block, tokens in match.pieces:
        assert block.first == at
        assert block.keys[:tokens] == keys[at : at + tokens]
        at += tokens
    return match.length, match.miss


def use(index: PrefixIndex, keys: Keys, *, salt: str = "") -> Match:
    """Match a request that begins with stored keys."""
    match = index.find(keys, salt=salt, limit=len(keys))
    index.count(match, prompt_tokens=len(keys), miss=match.miss)
    return match


def write(index: PrefixIndex, items: Iterable[Item], file_bytes: int = 500) -> list[File]:
    files = []
    for item in items:
        files.append(File(item.digest, json.loads(json.dumps(index.describe(item))), file_bytes))
        assert index.to_disk(item, file_bytes)
    return files


def taken(items: Iterable[Item]) -> int:
    return sum(memory_of(item, NBYTES) for item in items)


def test_salts_never_see_each_other() -> None:
    index = PrefixIndex(HYBRID)
    for salt in ("", "a", "b"):
        store(index, A, 16, salt=salt)
        index.add_snapshot(A, 16, salt, NBYTES, salt=salt)
    blocks = {index.find(A, salt=salt, limit=16).pieces[0].block for salt in ("", "a", "b")}
    assert len(blocks) == len({block.digest for block in blocks}) == 3
    match = index.find(A, salt="a", limit=16)
    assert match.snapshot is not None
    assert match.snapshot.payload == "a"
    index.lost(index.find(A, salt="a", limit=16).pieces[0].block)
    assert found(index, A, salt="b") == (16, "diverged_at_16")
    assert found(index, A, salt="never") == (0, "diverged_at_0")


def test_block_that_is_only_on_disk_is_refilled_in_ram() -> None:
    index = PrefixIndex(SLIDING)
    block = index.add(A, 0, 8, "p", NBYTES, window_from=4)
    write(index, [block])
    index.shrink_ram(0)
    index.add(A, 0, 8, "less of it", NBYTES, window_from=5)
    assert index.find(A, limit=8).missing == (block,)
    index.add(A, 0, 8, "as good", NBYTES, window_from=4)
    assert block.payload == "as good"
    assert index.find(A, limit=8).tier == "ram"


def test_unused_prefixes_are_evicted_before_reused_ones_and_shared_ones_last() -> None:
    index = PrefixIndex(DENSE)
    shared, used, fresh = (branch(A, 0, 1000 * n) for n in range(1, 4))
    store(index, shared, 16)
    for n in (1, 2):
        store(index, branch(shared, 8, 9000 * n), 16)
    use(index, shared[:8])
    (kept,) = store(index, used, 8)
    use(index, used)
    (last,) = store(index, fresh, 8)
    order: list[Item] = []
    while index.ram_bytes:
        order += index.shrink_ram(index.ram_bytes - 1)
    assert order.index(last) < order.index(kept) < len(order) - 1
    assert isinstance(order[-1], Block)
    assert order[-1].keys == shared[:8]


def test_reused_prefix_ages_and_is_evicted_before_new_ones() -> None:
    index = PrefixIndex(DENSE)
    old = branch(A, 0, 1000)
    store(index, old, 8)
    use(index, old)
    limit = 4 * index.ram_bytes
    for n in range(2, 40):
        store(index, branch(A, 0, 1000 * n), 8)
        index.shrink_ram(limit)
    assert found(index, old) == (0, "diverged_at_0")
    assert found(index, branch(A, 0, 39000)[:8]) == (8, "")


def test_superseded_snapshots_go_first_of_all() -> None:
    index = PrefixIndex(HYBRID)
    older = store(index, branch(A, 0, 900), 40)
    store(index, A, 40)
    turns = [index.add_snapshot(A, at, "s", NBYTES) for at in (10, 20, 30, 40)]
    use(index, A[:21])
    gone = [index.shrink_ram(index.ram_bytes - 1)[0] for _ in range(4)]
    assert gone == [turns[0], turns[2], turns[1], older[-1]]


def test_a_snapshot_where_prompts_part_is_not_superseded() -> None:
    index = PrefixIndex(HYBRID)
    store(index, A, 40)
    system, turn, last = (index.add_snapshot(A, at, "s", NBYTES) for at in (10, 20, 40))
    other = branch(A, 10, 900)
    use(index, other)
    store(index, other, 40)
    end = index.add_snapshot(other, 40, "s", NBYTES)
    order: list[Item] = []
    while index.ram_bytes:
        order += index.shrink_ram(index.ram_bytes - 1)
    assert order[:2] == [turn, last]
    assert order.index(end) < order.index(system)
    assert all(isinstance(item, Block) and item.first <= 10 for item in order[order.index(system) + 1 :])


def test_a_fork_of_a_branch_says_nothing_of_what_is_beside_the_branch() -> None:
    index = PrefixIndex(HYBRID)
    store(index, branch(A, 0, 3900), 40)
    store(index, A, 40, size=40)
    beside, _ = (index.add_snapshot(A, at, "s", NBYTES) for at in (12, 30))
    for keys in (branch(A, 10, 900), branch(branch(A, 10, 900), 14, 1900)):
        store(index, keys, 40)
    assert index.shrink_ram(index.ram_bytes - 1) == [beside]


def test_a_snapshot_counts_again_when_the_later_one_is_gone() -> None:
    index = PrefixIndex(HYBRID)
    (other,) = store(index, branch(A, 0, 900), 8)
    store(index, A, 16)
    earlier, later = (index.add_snapshot(A, at, "s", NBYTES) for at in (8, 16))
    index.lost(later)
    assert not earlier.is_superseded
    assert index.shrink_ram(index.ram_bytes - 1) == [other]


def test_the_queue_of_a_tier_does_not_grow_with_what_comes_and_goes() -> None:
    index = PrefixIndex(DENSE)
    (block,) = store(index, A, 8)
    for _ in range(10_000):
        index.to_disk(block, 500)
    assert len(index._disk._queue) < 100
    assert index.shrink_disk(0) == [block]


@pytest.mark.parametrize(
    "change",
    [
        {"keys": [1, 2, 3]},
        {"keys": []},
        {"keys": [2**70]},
        {"keys": "text"},
        {"first": -3},
        {"first": 2**70},
        {"window_from": 99},
        {"salt": None},
        {"parent": "0" * 40},
        {"kind": "snapshot", "at": 4},
        {"kind": "unheard of"},
    ],
)
def test_a_file_that_says_what_it_is_not_is_an_orphan(change: dict[str, Any]) -> None:
    writer = PrefixIndex(HYBRID)
    file, *rest = write(writer, [*store(writer, A, 16), writer.add_snapshot(A, 12, "s", NBYTES)])
    forged = File(file.digest, {**file.about, **change}, 500)
    index = PrefixIndex(HYBRID)
    assert sorted(index.restore_from_disk([forged, *rest])) == sorted(f.digest for f in (file, *rest))
    assert index.disk_bytes == 0
    assert found(index, A) == (0, "diverged_at_0")
    store(index, A, 16)


@pytest.mark.parametrize("at", [-1, 8, 17])
def test_a_snapshot_beside_its_block_is_an_orphan(at: int) -> None:
    writer = PrefixIndex(HYBRID)
    blocks = store(writer, A, 16)
    forged = snapshot_behind(blocks[1], at)
    files = [*write(writer, blocks), File(forged.digest, writer.describe(forged), 500)]
    index = PrefixIndex(HYBRID)
    assert index.restore_from_disk(files) == [forged.digest]
    assert index.disk_bytes == 1000


def test_of_two_files_for_one_place_the_longer_is_taken() -> None:
    long, short = PrefixIndex(DENSE), PrefixIndex(DENSE)
    files = [*write(short, store(short, A, 16)), *write(long, store(long, A, 40, size=40))]
    index = PrefixIndex(DENSE)
    assert sorted(index.restore_from_disk(files)) == sorted(file.digest for file in files[:2])
    assert found(index, A) == (40, "")


def test_clear_of_a_namespace_leaves_what_others_have_stored() -> None:
    index = PrefixIndex(HYBRID)
    mine, same, others, plain = salt_in("ann", ""), salt_in("ann", "tenant"), salt_in("bob", ""), "ann"
    items: dict[str, list[Item]] = {}
    for salt in (mine, same, others, plain):
        items[salt] = [*store(index, A, 40, salt=salt), index.add_snapshot(A, 24, "s", NBYTES, salt=salt)]
        write(index, items[salt])
    before = index.ram_bytes, index.disk_bytes
    assert set(index.clear("ann")) == {*items[mine], *items[same]}
    assert (index.ram_bytes, index.disk_bytes) == (before[0] // 2, before[1] // 2)
    for salt in (others, plain):
        assert found(index, A, salt=salt)[0] == 24
    assert found(index, A, salt=mine) == found(index, A, salt=same) == (0, "diverged_at_0")
    assert index.clear("nobody") == []


def test_index_overhead_counts_towards_ram_bytes() -> None:
    index = PrefixIndex(HYBRID)
    index.add(A, 0, 40, (), 0)
    assert index.ram_bytes > 8 * 40
    index.shrink_ram(0)
    assert index.ram_bytes == 0
