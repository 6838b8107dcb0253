"""Any history of the prefix index, compared with a naive reference: a dictionary of full prefixes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.worker.core.prefix.test_index import File, Keys
from worker.core.prefix.index import PrefixIndex
from worker.core.prefix.tree import Block, Item, Snapshot, memory_of
from worker.values import MEDIA_KEYS, CacheSpec

Place = tuple[str, Keys]
"""Salt, and all keys up to a position."""

NBYTES = 3000

KEYS_MAX = 16
keys_drawn = st.lists(st.sampled_from([1, 1, 2, MEDIA_KEYS + 1]), min_size=1, max_size=KEYS_MAX).map(tuple)
salts = st.sampled_from(["", "", "tenant"])
numbers = st.integers(0, 10**6)
shares = st.sampled_from([1.0, 0.95, 0.8, 0.8, 0.5, 0.0])
rarely = st.sampled_from([False] * 7 + [True])


@dataclass(eq=False)
class Thing:
    """A stored item in the naive index. `parent`: the item of the previous position."""

    item: Item
    salt: str
    keys: Keys
    first: int
    parent: Thing | None
    window_from: int = 0
    is_block: bool = True
    in_ram: bool = True
    on_disk: bool = False
    is_pinned: bool = False
    holds: int = 0

    @property
    def is_there(self) -> bool:
        return (self.in_ram or self.on_disk) and (self.parent is None or self.parent.is_there)

    @property
    def path(self) -> list[Thing]:
        return [self, *(self.parent.path if self.parent else [])]

    @property
    def size(self) -> int:
        return memory_of(self.item, NBYTES)


class Naive:
    """A naive index with an entry for every position of every prefix."""

    def __init__(self, shape: CacheSpec) -> None:
        self.shape = shape
        self.columns: dict[Place, Thing] = {}
        self.snapshots: dict[Place, Thing] = {}
        self.dead: list[Thing] = []

    def things(self) -> list[Thing]:
        return list(dict.fromkeys([*self.columns.values(), *self.snapshots.values()]))

    def bury(self) -> None:
        """Remove items that are neither in memory nor on disk, and their descendants."""
        self.dead += [thing for thing in self.things() if not thing.is_there]
        for places in (self.columns, self.snapshots):
            for place in [place for place, thing in places.items() if not thing.is_there]:
                del places[place]

    def known(self, salt: str, keys: Keys) -> int:
        at = 0
        while at < len(keys) and (salt, keys[: at + 1]) in self.columns:
            at += 1
        return at

    def can_restore(self, salt: str, keys: Keys, *, states: bool, ram_only: bool) -> bool:
        """Return whether a row with exactly `keys` can be restored."""
        needed = [self.columns.get((salt, keys[: at + 1])) for at in range(len(keys))]
        for at, thing in enumerate(needed):
            if thing is None or (ram_only and not thing.in_ram):
                return False
            if at >= len(keys) - self.shape.window and at < thing.window_from:
                return False
        snapshot = self.snapshots.get((salt, keys))
        return not (states and keys) or (
            snapshot is not None and (snapshot.in_ram if ram_only else snapshot.is_there)
        )

    def longest(self, salt: str, keys: Keys, *, states: bool, ram_only: bool = False) -> int:
        ends = range(len(keys), -1, -1)
        return next(p for p in ends if self.can_restore(salt, keys[:p], states=states, ram_only=ram_only))

    def why_not_longer(self, salt: str, keys: Keys, length: int) -> str:
        known = self.known(salt, keys)
        if length == len(keys):
            return ""
        return "incomplete" if length < known else f"diverged_at_{known}"


class Histories(RuleBasedStateMachine):
    """State machine: the index must behave as the naive dictionary does."""

    @initialize(window=st.sampled_from([0, 0, 3]), has_states=st.booleans(), start=keys_drawn, first=numbers)
    def open(self, window: int, has_states: bool, start: Keys, first: int) -> None:
        self.index = PrefixIndex(CacheSpec(window, has_states))
        self.naive = Naive(self.index.shape)
        self.files: set[str] = set()
        self.held: list[Thing] = []
        self.store(start, "", 4, first, has_states)

    def pick(self, number: int, things: list[Thing] | None = None) -> Thing | None:
        things = self.naive.things() if things is None else things
        return things[number % len(things)] if things else None

    def has_children(self, thing: Thing) -> bool:
        return any(each.parent is thing for each in self.naive.things())

    # --- storing and matching ---

    @rule(number=numbers, cut=st.integers(0, KEYS_MAX), tail=keys_drawn, hole=numbers, ends=st.booleans())
    def store_more(self, number: int, cut: int, tail: Keys, hole: int, ends: bool) -> None:
        """Store keys after a stored prefix or beside it."""
        if thing := self.pick(number):
            self.store((thing.keys[:cut] + tail)[:KEYS_MAX], thing.salt, 1 + number % 6, hole, ends)

    @rule(keys=keys_drawn, salt=salts, size=st.integers(1, 6), hole=numbers, ends=st.booleans())
    def store(self, keys: Keys, salt: str, size: int, hole: int, ends: bool) -> None:
        known, has_snapshot = self.index.reach(keys, salt=salt, end=len(keys))
        assert known == self.naive.known(salt, keys)
        assert has_snapshot == ((salt, keys) in self.naive.snapshots)
        for first in range(known, len(keys), size):
            last = min(first + size, len(keys))
            window_from = hole % (last + 1) if hole % 2 else first
            block = self.index.add(keys, first, last, object(), NBYTES, salt=salt, window_from=window_from)
            parent = self.naive.columns.get((salt, keys[:first]))
            window_from = max(first, window_from) if self.index.shape.window else first
            thing = Thing(block, salt, keys[:last], first, parent, window_from)
            assert isinstance(block, Block)
            assert (block.first, block.last, block.keys) == (first, last, keys[first:last])
            for at in range(first, last):
                assert (salt, keys[: at + 1]) not in self.naive.columns
                self.naive.columns[salt, keys[: at + 1]] = thing
        if ends:
            self.take_snapshot(keys, salt, len(keys))

    @rule(number=numbers, positions=st.lists(st.integers(1, KEYS_MAX), min_size=1, max_size=4))
    def take_snapshots_within(self, number: int, positions: list[int]) -> None:
        if thing := self.pick(number):
            for at in positions:
                self.take_snapshot(thing.keys, thing.salt, at)

    def take_snapshot(self, keys: Keys, salt: str, at: int) -> None:
        at = min(at, self.naive.known(salt, keys))
        if not at:
            return
        snapshot = self.index.add_snapshot(keys, at, object(), NBYTES, salt=salt)
        thing = self.naive.snapshots.get((salt, keys[:at]))
        if thing is None:
            parent = self.naive.columns[salt, keys[:at]]
            thing = Thing(snapshot, salt, keys[:at], at, parent, is_block=False)
            self.naive.snapshots[salt, keys[:at]] = thing
        assert thing.item is snapshot
        assert isinstance(snapshot, Snapshot)
        thing.in_ram = True

    @rule(keys=keys_drawn, salt=salts)
    def find_anything(self, keys: Keys, salt: str) -> None:
        self.find(keys, salt, len(keys), ram_only=False)

    @rule(number=numbers, cut=st.integers(0, KEYS_MAX), tail=keys_drawn, use=st.booleans())
    def find_everywhere(self, number: int, cut: int, tail: Keys, use: bool) -> None:
        """Match stored prefixes and branches of them, up to every position."""
        thing = self.pick(number)
        if thing is None:
            return
        for keys in (thing.keys, thing.keys[:cut] + tail):
            for limit in range(len(keys) + 1):
                self.find(keys, thing.salt, limit, ram_only=True)
                self.find(keys, thing.salt, limit, ram_only=False, use=use and limit == len(keys))

    def find(self, keys: Keys, salt: str, limit: int, *, ram_only: bool, use: bool = False) -> None:
        match = self.index.find(keys, salt=salt, limit=limit, ram_only=ram_only)
        wanted = keys[:limit]
        states = self.index.shape.has_states
        assert match.length == self.naive.longest(salt, wanted, states=states, ram_only=ram_only)
        assert match.known == self.naive.known(salt, wanted)
        assert match.miss == self.naive.why_not_longer(salt, wanted, match.length)
        self.check_pieces(salt, wanted[: match.length], match.pieces, match.snapshot)
        assert all(item.payload is None for item in match.missing)
        assert not (ram_only and match.missing)
        assert match.tier != "ram" or not match.missing
        if use:
            self.index.count(match, prompt_tokens=len(keys), miss=match.miss)

    def check_pieces(self, salt: str, keys: Keys, pieces: Any, snapshot: Snapshot | None) -> None:
        at = 0
        for block, tokens in pieces:
            for position in range(at, at + tokens):
                assert self.naive.columns[salt, keys[: position + 1]].item is block
            at += tokens
        assert at == len(keys)
        if snapshot is not None:
            assert self.naive.snapshots[salt, keys].item is snapshot
        assert (snapshot is not None) == bool(keys and self.index.shape.has_states)

    # --- eviction ---

    @rule(share=shares)
    def shrink_ram(self, share: float) -> None:
        limit = int(share * self.index.ram_bytes)
        before = [thing for thing in self.naive.things() if thing.in_ram]
        gone = set(self.index.shrink_ram(limit))
        evicted = [thing for thing in before if thing.item in gone]
        for thing in evicted:
            thing.in_ram = False
            assert not thing.holds
        self.naive.bury()
        left = [thing for thing in before if thing.in_ram]
        assert self.index.ram_bytes <= limit or all(thing.holds for thing in left)
        # Not one too many, and descendants before their parents.
        assert not evicted or self.index.ram_bytes + max(thing.size for thing in evicted) > limit
        assert not any(thing in other.path for other in left for thing in evicted)
        if any(thing.is_pinned for thing in evicted):
            assert all(thing.is_pinned or thing.holds for thing in left)

    @rule(share=shares)
    def shrink_disk(self, share: float) -> None:
        limit = int(share * self.index.disk_bytes)
        before = [thing for thing in self.naive.things() if thing.on_disk]
        gone = {item.digest for item in self.index.shrink_disk(limit)}
        self.files -= gone
        for thing in before:
            if thing.item.digest in gone:
                assert not thing.holds
                thing.on_disk = False
        self.naive.bury()
        left = [thing for thing in self.naive.things() if thing.on_disk]
        assert self.index.disk_bytes <= limit or all(thing.holds for thing in left)
        assert self.files == {thing.item.digest for thing in left}

    @rule(number=numbers, last=st.integers(0, KEYS_MAX))
    def pin(self, number: int, last: int) -> None:
        thing = self.pick(number)
        if thing is None:
            return
        self.index.pin(thing.keys, salt=thing.salt, last=last)
        for at in range(1, min(last, len(thing.keys)) + 1):
            for places in (self.naive.columns, self.naive.snapshots):
                if pinned := places.get((thing.salt, thing.keys[:at])):
                    pinned.is_pinned = True

    @rule(number=numbers)
    def hold(self, number: int) -> None:
        thing = self.pick(number)
        if thing is not None:
            self.index.hold([thing.item])
            self.held.append(thing)
            for each in thing.path:
                each.holds += 1

    @rule(number=numbers)
    def release(self, number: int) -> None:
        thing = self.pick(number, self.held)
        if thing is not None:
            self.held.remove(thing)
            self.index.release([thing.item])
            for each in thing.path:
                each.holds -= 1

    @rule(sure=rarely)
    def clear_now_and_then(self, sure: bool) -> None:
        if sure:
            self.clear()

    def clear(self) -> None:
        gone = {item.digest for item in self.index.clear()}
        self.files -= gone
        for thing in self.naive.things():
            if not thing.holds:
                assert thing.item.digest in gone
                thing.in_ram = thing.on_disk = False
        self.naive.bury()
        self.naive.dead.clear()

    # --- the disk ---

    @rule(start=numbers, count=st.integers(1, 10), file_bytes=st.integers(1, 5000))
    def write_some(self, start: int, count: int, file_bytes: int) -> None:
        for number in range(start, start + count):
            self.to_disk(number, file_bytes)

    def to_disk(self, number: int, file_bytes: int) -> None:
        thing = self.pick(number, [*self.naive.things(), *self.naive.dead[-5:]])
        if thing is None:
            return
        current = {each.item.digest: each for each in self.naive.things()}.get(thing.item.digest)
        assert self.index.to_disk(thing.item, file_bytes) == (current is not None)
        self.files.discard(thing.item.digest)  # the existing file of that name
        if current is not None:
            self.files.add(current.item.digest)
            current.on_disk = True

    @rule(number=numbers)
    def load(self, number: int) -> None:
        thing = self.pick(number, [each for each in self.naive.things() if each.on_disk and not each.in_ram])
        if thing is not None:
            self.index.loaded(thing.item, object(), NBYTES)
            thing.in_ram = True
            assert thing.item.payload is not None

    @rule(number=numbers, sure=rarely)
    def lose(self, number: int, sure: bool) -> None:
        leaves = [thing for thing in self.naive.things() if not self.has_children(thing)]
        thing = self.pick(number, self.naive.things() if sure else [*leaves, *self.naive.dead[-5:]])
        if thing is not None:
            self.index.lost(thing.item)
            thing.in_ram = thing.on_disk = False
            self.naive.bury()

    @rule(order=st.randoms(use_true_random=False), lost=st.integers(0, 3), sure=rarely)
    def restart(self, order: Any, lost: int, sure: bool) -> None:
        if not sure:
            return
        while self.held:
            self.release(0)
        self.shrink_disk(1.0)
        things = [thing for thing in self.naive.things() if thing.on_disk]
        order.shuffle(things)
        for thing in things[:lost]:
            thing.on_disk = False
            self.files.discard(thing.item.digest)
        found = [
            File(t.item.digest, json.loads(json.dumps(self.index.describe(t.item))), t.item.disk_bytes)
            for t in things[lost:]
        ]
        self.index = PrefixIndex(self.index.shape)
        orphans = self.index.restore_from_disk(found)
        for thing in self.naive.things():
            thing.in_ram = thing.is_pinned = False
        self.naive.bury()
        self.naive.dead.clear()
        left = {thing.item.digest: thing for thing in self.naive.things()}
        assert sorted(orphans) == sorted(self.files - left.keys())
        self.files -= set(orphans)
        items = self.index._tree.items
        assert items.keys() == left.keys()
        for digest, thing in left.items():
            thing.item = items[digest]

    # --- invariants ---

    @invariant()
    def everything_is_as_counted(self) -> None:
        if not hasattr(self, "index"):
            return
        things = self.naive.things()
        for thing in things:
            assert (thing.item.payload is not None) == thing.in_ram
            assert (thing.item.disk_bytes > 0) == thing.on_disk
            assert thing.item.holds == thing.holds
            assert thing.item.is_pinned == thing.is_pinned
        for thing in self.naive.dead:
            assert thing.item.payload is None
            assert thing.item.nbytes == thing.item.disk_bytes == 0
        assert self.index.ram_bytes == sum(thing.size for thing in things if thing.in_ram)
        assert self.index.disk_bytes == sum(thing.item.disk_bytes for thing in things)
        status = self.index.status()
        assert status.blocks == sum(thing.is_block for thing in things)
        assert status.snapshots == len(things) - status.blocks
        assert self.index._tree._roots.keys() == {thing.salt for thing in things}

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.held:
            self.release(0)
        self.clear()
        assert (self.index.ram_bytes, self.index.disk_bytes, self.files) == (0, 0, set())
        assert not self.naive.things()
        assert self.index.shrink_disk(0) == []


Histories.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

test_any_history_leaves_what_a_dictionary_of_prefixes_would_have = Histories.TestCase
