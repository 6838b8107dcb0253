"""Write budget of the prefix cache: what is written to the disk, how much a day, and what memory serves."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.core.prefix.test_store import DENSE, HYBRID, cached, tokens
from tests.worker.engines import END, House, ScriptedEngine
from worker.core.commands import DiskSpace
from worker.core.prefix.disk import DiskTier
from worker.core.prefix.folder import Folder, WriteLedger, ledger_of
from worker.core.prefix.store import PrefixStore
from worker.core.prefix.tree import Item, block_behind, root_of, snapshot_behind
from worker.core.prefix.write_budget import DAY_S, may_write
from worker.values import CacheSpec

PLENTY = 2**40
FINGERPRINT = "f1" * 16


@given(
    day_bytes=st.integers(0, 1000),
    events=st.lists(
        st.tuples(st.floats(0, DAY_S), st.integers(1, 600), st.sampled_from(["", "", "restart", "other"])),
        max_size=60,
    ),
)
def test_no_day_has_more_writes_than_the_budget_whatever_restarts_or_shares_it(
    day_bytes: int, events: list[tuple[float, int, str]]
) -> None:
    clock, written = SimpleNamespace(now=1e9), list[tuple[float, int]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "writes.json"
        ledgers = [WriteLedger(path, day_bytes, lambda: clock.now) for _ in range(2)]
        for wait_s, size, event in events:
            clock.now += wait_s
            if event == "restart":
                ledgers[0] = WriteLedger(path, day_bytes, lambda: clock.now)
            ledgers[0].look()
            left = ledgers[0].left
            assert ledgers[event == "other"].spend(size) == (size <= left)
            if size <= left:
                written.append((clock.now, size))
    for end, _ in written:
        assert sum(size for at, size in written if end - DAY_S < at <= end) <= day_bytes + 1


def test_a_budget_refills_over_a_day_and_not_from_a_clock_that_was_set_back(tmp_path: Path) -> None:
    clock = SimpleNamespace(now=1e9)
    ledger = WriteLedger(tmp_path / "new" / "writes.json", 1000, lambda: clock.now)
    assert ledger.left == 500
    assert ledger.spend(500)
    for now, left in ((1e9 - 5 * DAY_S, 0), (1e9 + DAY_S / 2, 250), (1e9 + 9 * DAY_S, 500)):
        clock.now = now
        ledger.look()
        assert ledger.left == left


@pytest.mark.parametrize("record", [b"\0" * 64, b'{"debt":', b'{"debt":-9,"at":0}', b'{"debt":"1","at":0}'])
def test_a_damaged_record_is_a_budget_that_is_used_up(tmp_path: Path, record: bytes) -> None:
    clock = SimpleNamespace(now=1e9)
    path = tmp_path / "writes.json"
    path.write_bytes(record)
    ledger = WriteLedger(path, 1000, lambda: clock.now)
    assert not ledger.spend(1)
    path.write_bytes(b"")
    assert ledger.spend(1)


def test_the_default_budget_is_a_share_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=10**12, free=1))
    assert ledger_of(tmp_path, None).full.day_bytes == 50 * 10**9
    assert ledger_of(tmp_path, 7).full.day_bytes == 7


@given(
    st.booleans(), st.booleans(), st.booleans(), st.integers(1, 100), st.integers(0, 100), st.integers(0, 100)
)
def test_what_was_hit_is_written_before_what_was_not(
    ends_turn: bool, has_left: bool, is_snapshot: bool, size: int, left: int, burst: int
) -> None:
    def item(**state: bool | int) -> Item:
        block = block_behind(root_of(""), (1,), 0, 0)
        made = snapshot_behind(block, 1) if is_snapshot else block
        for name, value in state.items():
            setattr(made, name, value)
        return made

    def allowed(**state: bool | int) -> bool:
        return may_write(item(**state), size, left, burst, ends_turn=ends_turn)

    for hit in ({"uses": 1}, {"is_shared": True}, {"is_pinned": True}):
        assert allowed(**hit) == (size <= left)
        assert allowed(**hit, left_disk=has_left) >= allowed(left_disk=has_left)
        assert allowed(**hit, left_disk=True) == (size + burst // 2 <= left)
    assert allowed() == (ends_turn and size + burst // 2 <= left)
    if is_snapshot:
        assert not allowed(is_superseded=True, uses=3)


# --- the store, with files -----------------------------------------------------------------------------


@contextmanager
def _house(
    folder: Path, day_bytes: int, monkeypatch: pytest.MonkeyPatch, shape: CacheSpec = DENSE
) -> Iterator[tuple[House, PrefixStore, Counter[str]]]:
    """Yield a loop over a disk tier, its store, and the bytes saved for each digest."""
    saved, save = Counter[str](), Folder.save

    def counted(self: Folder, draft: object) -> None:
        saved[draft.digest] += draft.file_bytes  # type: ignore[attr-defined]
        save(self, draft)  # type: ignore[arg-type]

    monkeypatch.setattr(Folder, "save", counted)
    house = House(rows_max=16, prefill_tokens=256, engine=ScriptedEngine(shape=shape), store_bytes=PLENTY)
    assert house.store is not None
    disk = DiskTier(folder / FINGERPRINT, FINGERPRINT, WriteLedger(folder / "writes.json", day_bytes))
    house.store.disk, house.store.disk_max = disk, PLENTY
    try:
        house.store.open()
        yield house, house.store, saved
    finally:
        disk.close(wait=True)
        monkeypatch.setattr(Folder, "save", save)


def ask(house: House, id: str, prompt: tuple[int, ...], *, is_chat: bool = True) -> tuple[int, ...]:
    """Answer a prompt; return the conversation until then."""
    house.submit(id, 5, 6, tokens=prompt, boundaries=(100, len(prompt) - 3) if is_chat else ())
    disk = house.store.disk if house.store else None
    assert disk is not None
    house.inbox.on_wait = lambda: disk.flush() and None
    house.run()
    assert disk.flush()
    house.inbox.put(DiskSpace())
    house.run()
    return (*prompt, 5, 6, END)


@pytest.mark.parametrize("shape", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_chats_write_each_turn_once_and_another_worker_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: CacheSpec
) -> None:
    said: dict[int, tuple[int, ...]] = {}
    with _house(tmp_path, PLENTY, monkeypatch, shape) as (house, store, saved):
        for turn in range(4):
            for chat in range(6):
                before = said.get(chat) or tokens(9, 700)
                said[chat] = ask(house, f"{chat}.{turn}", (*before, *tokens(100 * chat + turn, 60)))
        assert saved.keys() <= store.index._tree.items.keys()
        assert sum(saved.values()) == store.status().written_bytes == store.index.disk_bytes
        snapshots = {digest for digest, item in store.index._tree.items.items() if not hasattr(item, "keys")}
        # One at the end of each turn; those of the prompt and its boundaries were replaced before it ended,
        # except for the one that all chats share.
        assert len(saved.keys() & snapshots) == (6 * 4 + 1 if shape.has_states else 0)
    with _house(tmp_path, PLENTY, monkeypatch, shape) as (house, _, saved):
        for chat, before in said.items():
            ask(house, f"again {chat}", (*before, 7))
            assert cached(house, f"again {chat}") >= len(before) - 1
        rewritten = sum(saved.values())
    assert rewritten < 0.2 * sum(file.stat().st_size for file in (tmp_path / FINGERPRINT).iterdir())


def test_what_is_neither_hit_nor_the_end_of_a_turn_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tokens(1, 1024)
    with _house(tmp_path, PLENTY, monkeypatch) as (house, store, saved):
        ask(house, "alone", (*shared, *tokens(2, 600)), is_chat=False)
        assert not saved
        for number in range(3):
            ask(house, f"like it {number}", (*shared, *tokens(3 + number, 600)), is_chat=False)
        written = [item for digest, item in store.index._tree.items.items() if digest in saved]
        assert {item.position < len(shared) for item in written} == {True}
        assert len(written) == len({item.position for item in written}) == 4
        house.submit("cancelled", 5, tokens=tokens(20, 2000), boundaries=(1000,))
        house.engine.at["prefill", house.engine.calls["prefill"] + 3] = lambda: house.drop("cancelled")
        house.run()
        assert len(saved) == 4


def test_without_budget_memory_serves_and_what_is_hit_has_the_last_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(7)
    with _house(tmp_path, 100_000, monkeypatch) as (house, store, saved):
        said = [tokens(100 + chat, 700) for chat in range(8)]
        for turn in range(6):
            for chat, before in enumerate(said):
                said[chat] = ask(house, f"{chat}.{turn}", (*before, *tokens(chance.randrange(2**31), 60)))
                assert cached(house, f"{chat}.{turn}") == (len(before) if turn else 0)
        status = store.status()
        assert 40_000 < sum(saved.values()) == status.written_bytes <= 50_000
        assert status.writes_limit == 100_000
        assert status.writes_left < 10_000
        new = [item for digest, item in store.index._tree.items.items() if digest in saved and not item.uses]
        assert sum(saved[item.digest] for item in new) <= 25_000
    with _house(tmp_path, 0, monkeypatch) as (house, _, saved):
        ask(house, "again", (*said[0], 7))
        assert cached(house, "again") >= 700
        assert not saved


def test_a_second_worker_of_the_model_does_not_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(1, 1500)
    with (
        _house(tmp_path, PLENTY, monkeypatch) as (one, _, _),
        _house(tmp_path, PLENTY, monkeypatch) as (other, store, saved),
    ):
        ask(one, "one", prompt)
        before = sum(saved.values())
        ask(other, "other", prompt)
        assert store.index.disk_bytes > 0
        assert store.status().written_bytes == 0
        assert sum(saved.values()) == before
