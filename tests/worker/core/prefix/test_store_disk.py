"""The prefix store on a disk that answers in any order, late, in any grouping, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.factories import engine_request
from tests.worker.core.prefix.test_store import PLENTY, SHAPES, cached
from tests.worker.engines import House, ScriptedEngine
from worker.core.commands import Command, DiskSpace, Fetched
from worker.core.engine_core import PAUSE_S
from worker.core.prefix.folder import Record, StoredItem
from worker.core.prefix.index import PrefixIndex
from worker.core.prefix.store import READ_SILENCE_S_MAX, READ_WAIT_S_MAX, PrefixStore
from worker.core.prefix.write_budget import WriteBudget
from worker.core.rows import Row
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.values import CacheSpec

SYSTEM = tuple(range(1, 1401))
"""Common prefix of all prompts: more than two blocks."""
PROMPTS = tuple(
    (*SYSTEM[:shared], *range(10_000 * n, 10_000 * n + 700))
    for n, shared in enumerate((1400, 1400, 1100, 600), 1)
)


class ScriptedDisk:
    """A disk that stores writes at once, and answers a read when the test asks for it, if ever."""

    name = "scripted"
    room: int | None = None
    budget = WriteBudget(2 * PLENTY)
    writes_left = PLENTY
    written = 0

    def __init__(self, files: Iterable[tuple[StoredItem, Record]] = ()) -> None:
        self.files = {found.digest: (found, record) for found, record in files}
        self.asked: dict[str, Callable[[dict[str, Record | None]], None]] = {}

    def scan(self) -> list[StoredItem]:
        return [found for found, _ in self.files.values()]

    def write(self, record: Record, done: Callable[[str, int | None], None]) -> bool:
        self.files[record.digest] = StoredItem(record.digest, record.about, 100), record
        done(record.digest, 100)
        return True

    def read(
        self,
        digests: Iterable[str],
        done: Callable[[dict[str, Record | None]], None],
        buffer: memoryview | None = None,
    ) -> None:
        for digest in digests:
            assert digest not in self.asked, "a read of this digest is already pending"
            self.asked[digest] = done

    def answer(self, digests: Iterable[str], *, lost: bool = False) -> None:
        """Answer these reads in one message; `lost`: none of them can be read."""
        chosen = list(digests)
        records = {d: None if lost or d not in self.files else self.files[d][1] for d in chosen}
        done = [self.asked.pop(digest) for digest in chosen]
        if done:
            done[0](records)

    def remove(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.files.pop(digest, None)

    def close(self, wait: bool) -> None:
        """Do nothing: no file is open."""


def _house(shape: CacheSpec, disk: ScriptedDisk) -> House:
    house = House(rows_max=16, prefill_tokens=256, engine=ScriptedEngine(shape=shape), store_bytes=PLENTY)
    assert house.store is not None
    house.store.disk, house.store.disk_max = disk, PLENTY  # type: ignore[assignment]
    house.store.open()
    return house


def _written(shape: CacheSpec) -> ScriptedDisk:
    """Return a disk with all prompts on it, as an earlier worker would leave it."""
    disk = ScriptedDisk()
    house = _house(shape, disk)
    for number, prompt in enumerate(PROMPTS):
        house.submit(f"old {number}", 5, tokens=prompt, boundaries=(600, 1100, 1400))
        house.run()
    assert len(disk.files) > 4
    return ScriptedDisk(disk.files.values())


WRITTEN = {name: _written(shape) for name, shape in SHAPES.items()}


class StoreOnDisk(RuleBasedStateMachine):
    """State machine: rows that share blocks join and leave while the disk answers in any order."""

    shape_name = "dense"

    def __init__(self) -> None:
        super().__init__()
        shape = SHAPES[self.shape_name]
        self.disk = ScriptedDisk(WRITTEN[self.shape_name].files.values())
        self.inbox: list[Command] = []
        self.engine = ScriptedEngine(shape=shape)
        self.store = PrefixStore(
            self.engine,
            PrefixIndex(shape),
            PLENTY,
            self.inbox.append,
            self.disk,
            PLENTY,  # type: ignore[arg-type]
        )
        self.store.open()
        self.scheduler = Scheduler(SchedulerConfig(rows_max=99), self.store.index)
        self.rows: dict[str, Row] = {}
        self.count = 0
        self.now = 0.0

    @rule(prompt=st.sampled_from(PROMPTS), salt=st.sampled_from(["", "", "", "other"]))
    def arrive(self, prompt: tuple[int, ...], salt: str) -> None:
        self.count += 1
        id = f"row {self.count}"
        request = engine_request(id, prompt, end_tokens=frozenset((0,)), salt=salt)
        self.rows[id] = self.scheduler.add(request, self.now)
        self.store.fetch(self.rows[id], self.now)

    @precondition(lambda self: self.disk.asked)
    @rule(data=st.data(), lost=st.sampled_from([False, False, False, True]))
    def answer(self, data: Any, lost: bool) -> None:
        waiting = sorted(self.disk.asked)
        self.disk.answer(data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True)), lost=lost)
        self._take_answers()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        id = data.draw(st.sampled_from(sorted(self.rows)))
        self.scheduler.drop(id)
        self.store.drop(self.rows.pop(id))

    @rule()
    def clear(self) -> None:
        self.store.clear()

    @rule(ram_max=st.sampled_from([0, 600, 2000, PLENTY]))
    def shrink(self, ram_max: int) -> None:
        self.store.fit(ram_max)

    @rule(seconds=st.sampled_from([0.1, READ_SILENCE_S_MAX / 2, READ_SILENCE_S_MAX * 1.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._release(self.store.overdue(self.now))

    def _release(self, rows: Sequence[Row]) -> None:
        for row in rows:
            assert row.is_blocked
            row.is_blocked = False

    def _take_answers(self) -> None:
        for command in self.inbox:
            if isinstance(command, Fetched):
                self._release(self.store.fetched(command.records, self.now))
        self.inbox.clear()

    @invariant()
    def rows_wait_only_for_what_is_being_read(self) -> None:
        assert [row for row in self.rows.values() if row.is_blocked] == self.store._waiting
        for row in self.store._waiting:
            assert row.awaited, "the row waits for no read"
            assert row.awaited <= self.disk.asked.keys()

    @invariant()
    def nobody_waits_for_longer_than_the_bound(self) -> None:
        for row in self.store._waiting:
            assert self.now - row.awaited_since <= READ_WAIT_S_MAX + READ_SILENCE_S_MAX * 1.1

    def teardown(self) -> None:
        self.disk.answer(sorted(self.disk.asked))
        self._take_answers()
        assert not any(row.is_blocked for row in self.rows.values()), "a row waits after all answers"
        assert not self.store._reading
        assert not [item for item in self.store.index._tree.items.values() if item.holds]


class HybridStoreOnDisk(StoreOnDisk):
    shape_name = "hybrid"


_SETTINGS = settings(max_examples=20, stateful_step_count=40)
for _machine in (StoreOnDisk, HybridStoreOnDisk):
    _machine.TestCase.settings = _SETTINGS
TestDense = StoreOnDisk.TestCase
TestHybrid = HybridStoreOnDisk.TestCase


# --- with the loop ---


@pytest.mark.parametrize("name", SHAPES)
def test_rows_that_share_blocks_start_when_their_own_reads_are_answered(name: str) -> None:
    disk = ScriptedDisk(WRITTEN[name].files.values())
    house = _house(SHAPES[name], disk)
    # One block at a time: the second row's blocks arrive in several messages.
    house.inbox.on_wait = lambda: disk.answer(sorted(disk.asked)[:1])
    for number, prompt in enumerate(PROMPTS[:2]):
        house.submit(f"row {number}", 5, tokens=(*prompt, 9), boundaries=(600, 1100, 1400))
    house.run()
    for number in range(2):
        assert house.text(f"row {number}") == "<5>"
        assert cached(house, f"row {number}") >= 1400


def test_row_goes_on_without_its_prefix_when_the_disk_is_silent() -> None:
    disk = ScriptedDisk(WRITTEN["dense"].files.values())
    house = _house(SHAPES["dense"], disk)
    house.inbox.on_wait = lambda: setattr(house, "now", house.now + PAUSE_S)
    began = house.now
    house.submit("first", 5, tokens=PROMPTS[0])
    house.run()
    assert house.text("first") == "<5>"
    assert cached(house, "first") == 0
    assert READ_SILENCE_S_MAX < house.now - began < 2 * READ_SILENCE_S_MAX
    assert house.store is not None
    assert house.store.read_timeouts == 1
    # Until the disk answers again, no row waits for it.
    before = house.now
    house.submit("second", 6, tokens=PROMPTS[2])
    house.run()
    assert house.now == before
    disk.answer(sorted(disk.asked))
    house.submit("third", 7, tokens=PROMPTS[1])
    house.inbox.on_wait = lambda: disk.answer(sorted(disk.asked))
    house.run()
    assert house.text("third") == "<7>"
    assert house.store.read_timeouts == 1


def test_row_goes_on_without_its_prefix_when_the_disk_is_slow() -> None:
    disk = ScriptedDisk(WRITTEN["dense"].files.values())
    house = _house(SHAPES["dense"], disk)

    def turn() -> None:
        house.now += 1.0
        # A disk that constantly answers other reads, but this row's with one block in ten seconds.
        assert house.store is not None
        house.store._disk_answered_at = house.now
        if not house.now % 10:
            disk.answer(sorted(disk.asked)[:1])

    house.inbox.on_wait = turn
    house.submit("row", 5, tokens=PROMPTS[0])
    house.run()
    assert house.text("row") == "<5>"
    assert house.store is not None
    assert house.store.read_timeouts == 1


def test_loop_waits_for_a_command_while_its_only_row_is_held() -> None:
    disk = ScriptedDisk(WRITTEN["dense"].files.values())
    house = _house(SHAPES["dense"], disk)
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        house.now += PAUSE_S
        if turns == 50:
            disk.answer(sorted(disk.asked))

    house.inbox.on_wait = turn
    house.submit("row", 5, tokens=PROMPTS[0])
    house.run()
    assert house.text("row") == "<5>"
    assert set(house.inbox.timeouts) == {PAUSE_S}
    assert turns == 50
    # Nothing was run in these turns, so none of them counts as a step.
    assert house.loop.counters.steps <= 5


def test_prefixes_on_disk_give_way_when_others_fill_it() -> None:
    disk = ScriptedDisk(WRITTEN["dense"].files.values())
    house = _house(SHAPES["dense"], disk)
    assert house.store is not None
    count = len(disk.files)
    house.store.disk_share, disk.room = 0.25, 4 * 100 * count
    house.loop.inbox.put(DiskSpace())
    house.run()
    assert len(disk.files) == count
    disk.room = 4 * 250
    house.loop.inbox.put(DiskSpace())
    house.run()
    assert len(disk.files) == 2
    assert house.store.status().disk_limit == 250
