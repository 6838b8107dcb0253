"""Store of batches: what was stored is there after any crash, and nothing that was not."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.batches import processing, records
from broker.batches.records import BatchRecord, FileRecord
from broker.batches.results import LineResult, ResultsLog, decode_record, encode_record
from broker.batches.store import BATCHES_MAX, BatchStore, StorageError, StorageFullError

NOW = 1_700_000_000
BYTES_MAX = 2**20
CHAT = "/v1/chat/completions"
LINES = 6


def content(count: int = LINES, salt: str = "") -> bytes:
    line = '{"custom_id":"c%d%s","method":"POST","url":"%s","body":{"model":"m"}}\n'
    return b"".join((line % (n, salt, CHAT)).encode() for n in range(1, count + 1))


def file_record(id: str, **fields: object) -> FileRecord:
    known = {"owner": "", "filename": "f", "purpose": "batch", "bytes": 0, "created_at": NOW}
    return FileRecord(id=id, **known | {"expires_at": NOW + 10**6} | fields)  # type: ignore[arg-type]


def batch_record(id: str, file: str) -> BatchRecord:
    return BatchRecord(
        id=id, owner="", dialect="openai", endpoint=CHAT, input_file_id=file, created_at=NOW,
        expires_at=NOW + 86400, seed=1, entered={"validating": NOW},
    )  # fmt: skip


def upload(store: BatchStore, id: str, data: bytes) -> FileRecord:
    under_way = store.begin_upload(id)
    try:
        store.write(under_way, data)
        return store.commit(under_way, file_record(id))
    finally:
        store.abandon(under_way)


def result(number: int, size: int = 10) -> LineResult:
    return LineResult(number, number % 3 > 0, (5, 1, 2, 0), b'{"n":%d,"x":"%s"}' % (number, b"x" * size))


class StoreMachine(RuleBasedStateMachine):
    """A store beside a model of what it must hold, through crashes that tear what was being written."""

    def __init__(self) -> None:
        super().__init__()
        # A crash is simulated, so that no disk has to be waited for.
        self.no_sync = mock.patch("os.fsync")
        self.no_sync.start()
        self.folder = Path(tempfile.mkdtemp())
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, BatchRecord] = {}
        self.results: dict[str, list[int]] = {}
        self.store = BatchStore(self.folder, BYTES_MAX)
        self.store.open()
        self.count = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)
        self.no_sync.stop()

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def running(self) -> list[str]:
        return [id for id, batch in self.batches.items() if not batch.is_over]

    @rule()
    def upload_a_file(self) -> None:
        id = self.name("file-")
        self.files[id] = content(salt=id)
        assert upload(self.store, id, self.files[id]).bytes == len(self.files[id])

    @rule()
    def begin_an_upload_and_leave(self) -> None:
        under_way = self.store.begin_upload(self.name("file-"))
        self.store.write(under_way, b"half a li")
        under_way.file.flush()
        self.store.abandon(under_way)

    def requests(self) -> list[str]:
        """Return the files that were uploaded; the others are results."""
        return sorted(id for id, data in self.files.items() if data == content(salt=id))

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def create_a_batch(self, data: st.DataObject) -> None:
        id = self.name("batch_")
        self.store.put(batch_record(id, data.draw(st.sampled_from(self.requests()))))
        processing.prepare(self.store, id, 2**20, NOW)
        self.batches[id] = self.store.batches[id]
        assert self.batches[id].status == "in_progress"
        self.results[id] = []

    @precondition(lambda self: self.running())
    @rule(data=st.data(), size=st.integers(0, 5000))
    def store_results(self, data: st.DataObject, size: int) -> None:
        id = data.draw(st.sampled_from(self.running()))
        left = [n for n in range(1, LINES + 1) if n not in self.results[id]]
        numbers = data.draw(st.lists(st.sampled_from(left), unique=True)) if left else []
        self.store.append(id, [result(n, size) for n in numbers])
        self.results[id] += numbers

    @precondition(lambda self: self.running())
    @rule(data=st.data(), ending=st.sampled_from(("completed", "expired", "cancelled")))
    def end_a_batch(self, data: st.DataObject, ending: records.Ending) -> None:
        id = data.draw(st.sampled_from(self.running()))
        self.store.put(records.finalize(self.store.batches[id], ending, NOW))
        batch = self.store.batches[id]
        index = processing.index_lines(self.store.content_path(batch.input_file_id))
        for _ in range(data.draw(st.integers(1, 2))):  # as after a crash in between
            if not self.store.batches[id].is_over:
                processing.finalize(self.store, id, index, 10**6, NOW)
        self.batches[id] = self.store.batches[id]
        assert self.batches[id].status == ending
        for file in (self.batches[id].output_file_id, self.batches[id].error_file_id):
            if file is not None:
                self.files[file] = self.store.content_path(file).read_bytes()
        whole = b"".join(self.files.get(self.batches[id].output_file_id or "", b"").splitlines(True))
        told = [line.split(b",")[0] for line in whole.splitlines()]
        good = sorted(n for n in self.results[id] if n % 3 > 0)
        assert told == [b'{"n":%d' % n for n in good], "each line once, in order"

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def delete_a_file(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.files)))
        if not self.store.is_in_use(id):
            self.store.delete_file(id)
            del self.files[id]

    @rule(data=st.data(), cut=st.integers(0, 6000), noise=st.binary(max_size=40))
    def lose_the_power(self, data: st.DataObject, cut: int, noise: bytes) -> None:
        """The last bytes of a log are lost, or torn; files were being written."""
        self.store.close()
        if running := self.running():
            id = data.draw(st.sampled_from(running))
            log = self.folder / "batches" / f"{id}.results"
            size = log.stat().st_size if log.exists() else 0
            with log.open("ab") as file:
                file.truncate(max(0, size - cut))
                file.write(noise)
        (self.folder / "uploads" / "file-torn").write_bytes(noise)
        (self.folder / "files" / "file-orphan.jsonl").write_bytes(noise)
        (self.folder / "batches" / "batch_torn.json.new").write_bytes(noise)
        self.store = BatchStore(self.folder, BYTES_MAX)
        self.store.open()
        for id in self.running():
            found = [n for n in self.results[id] if n in self.store.results(id)]
            assert found == self.results[id][: len(found)], "only the last ones may be lost"
            self.results[id] = found

    @invariant()
    def what_is_there_is_what_was_stored(self) -> None:
        assert self.store.files.keys() == self.files.keys()
        assert self.store.batches == self.batches
        for id, data in self.files.items():
            assert self.store.content_path(id).read_bytes() == data
        for id in self.running():
            log = self.store.results(id)
            for n in range(1, LINES + 1):
                assert (n in log) == (n in self.results[id])
        used = sum(map(len, self.files.values())) + sum(self.store.results(id).size for id in self.running())
        assert self.store.used == used


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestStore = StoreMachine.TestCase


# --- bounds and errors -------------------------------------------------------------------------------


def test_a_torn_record_is_no_result() -> None:
    whole = encode_record(result(7))
    assert decode_record(whole) == result(7)
    for cut in range(1, len(whole)):
        assert decode_record(whole[:-cut]) is None
        assert decode_record(whole[:cut] + bytes([whole[cut] ^ 1]) + whole[cut + 1 :]) is None


def test_uploads_leave_room_for_results(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000)
    with pytest.raises(StorageFullError):
        upload(store, "file-a", b"x" * 501)
    upload(store, "file-a", b"x" * 500)
    assert store.used == 500
    assert not list((tmp_path / "uploads").iterdir())
    store.put(batch_record("batch_a", "file-a"))
    with pytest.raises(StorageFullError):
        store.append("batch_a", [result(1, size=600)])
    assert 1 not in store.results("batch_a")
    store.close()


def test_a_full_disk_loses_no_result_that_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ResultsLog(tmp_path / "log")
    log.append([result(1)])
    write = os.pwrite

    def half(descriptor: int, data: bytes, offset: int) -> int:
        write(descriptor, bytes(data)[:5], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="No space"):
        log.append([result(2)])
    monkeypatch.undo()
    log.append([result(3)])
    log.close()
    again = ResultsLog(tmp_path / "log")
    assert [n in again for n in (1, 2, 3)] == [True, False, True]
    again.close()


def test_only_one_gateway_uses_a_folder_which_is_its_owners_alone(tmp_path: Path) -> None:
    first, second = BatchStore(tmp_path / "b", 1000), BatchStore(tmp_path / "b", 1000)
    first.open()
    with pytest.raises(StorageError, match="another gateway"):
        second.open()
    first.close()
    second.open()
    second.batches = dict.fromkeys(map(str, range(BATCHES_MAX)), batch_record("b", "f"))
    with pytest.raises(StorageFullError):
        second.put(batch_record("batch_new", "f"))
    second.batches = {}
    second.close()
    (tmp_path / "b").chmod(0o755)
    with pytest.raises(StorageError, match="0700"):
        second.open()


def test_old_files_and_batches_are_deleted_but_none_in_use(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, BYTES_MAX)
    for id in ("file-a", "file-b"):
        upload(store, id, content())
    store.put(batch_record("batch_a", "file-a"))
    store.put(records.fail(batch_record("batch_b", "file-b"), [], NOW))
    store.expire(NOW + 2 * 10**6, age_s_max=3600)
    assert (set(store.files), set(store.batches)) == ({"file-a"}, {"batch_a"})
    store.close()
