"""Store of batches: what was stored is there after any crash, and nothing that was not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.api.batches import processing, records
from broker.api.batches.records import BatchRecord, FileRecord, LineResult
from broker.api.batches.store import BATCHES_MAX, DATABASE_NAME, BatchStore, StorageError
from broker.journal.database import locked
from tests.broker.journal.test_file import MEMORY

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
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.log = self.folder / f"{DATABASE_NAME}-wal"
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, BatchRecord] = {}
        self.results: dict[str, list[int]] = {}
        self.store = BatchStore(self.folder, BYTES_MAX)
        self.store.open()
        self.count = 0
        self.untold = 0
        """Where in SQLite's log the results begin that nothing was stored after; 0: there are none."""

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
        self.untold = 0

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
        self.untold = 0

    @precondition(lambda self: self.running())
    @rule(data=st.data(), size=st.integers(0, 5000))
    def store_results(self, data: st.DataObject, size: int) -> None:
        id = data.draw(st.sampled_from(self.running()))
        left = [n for n in range(1, LINES + 1) if n not in self.results[id]]
        numbers = data.draw(st.lists(st.sampled_from(left), unique=True)) if left else []
        self.untold = self.untold or (self.log.stat().st_size if self.log.exists() else 0)
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
        self.untold = 0
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
            self.untold = 0

    @rule(data=st.data(), noise=st.binary(max_size=40))
    def lose_the_power(self, data: st.DataObject, noise: bytes) -> None:
        """The end of the log is lost, or torn, with results that nobody was told."""
        parts = {path: path.read_bytes() for path in self.folder.glob(f"{DATABASE_NAME}*")}
        self.store.close()
        if size := len(parts.get(self.log, b"")):
            cut = data.draw(st.integers(self.untold or size, size))
            parts[self.log] = parts[self.log][:cut] + noise
        for path, content in parts.items():
            path.write_bytes(content)
        (self.folder / "uploads" / "file-torn").write_bytes(noise)
        (self.folder / "files" / "file-orphan.jsonl").write_bytes(noise)
        self.store = BatchStore(self.folder, BYTES_MAX)
        self.store.open()
        self.untold = 0
        for id in self.running():
            found = [n for n in self.results[id] if self.store.result(id, n)]
            assert found == self.results[id][: len(found)], "only the last ones may be lost"
            self.results[id] = found

    @invariant()
    def what_is_there_is_what_was_stored(self) -> None:
        assert self.store.files.keys() == self.files.keys()
        assert self.store.batches.keys() == self.batches.keys()
        for id, data in self.files.items():
            assert self.store.content_path(id).read_bytes() == data
        used = sum(map(len, self.files.values()))
        for id, batch in self.batches.items():
            numbers = [] if batch.is_over else self.results[id]
            stored = [self.store.result(id, n) for n in range(1, LINES + 1)]
            assert [n for n, each in enumerate(stored, 1) if each] == sorted(numbers)
            counts, nbytes = self.store.batches[id].counts, sum(len(each[1]) for each in stored if each)
            if not batch.is_over:
                assert counts.done == len(numbers)
                assert counts.succeeded == sum(each[0] for each in stored if each)
            assert self.store.batches[id].result_bytes == nbytes
            used += nbytes
        assert self.store.used == used


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestStore = StoreMachine.TestCase


# --- bounds and errors -------------------------------------------------------------------------------


def test_uploads_leave_room_for_results(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000)
    with pytest.raises(StorageError):
        upload(store, "file-a", b"x" * 501)
    upload(store, "file-a", b"x" * 500)
    assert store.used == 500
    assert not list((tmp_path / "uploads").iterdir())
    store.put(batch_record("batch_a", "file-a"))
    with pytest.raises(StorageError):
        store.append("batch_a", [result(1, size=600)])
    assert store.result("batch_a", 1) is None
    store.close()


def test_a_full_disk_loses_no_result_that_was_stored(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, BYTES_MAX)
    upload(store, "file-a", content())
    store.put(batch_record("batch_a", "file-a"))
    store.append("batch_a", [result(1)])
    store._run("PRAGMA max_page_count = 1")  # what there is already
    with pytest.raises(StorageError, match="full"):
        store.append("batch_a", [result(2), result(3, size=100_000)])
    store._run("PRAGMA max_page_count = 10000")
    assert store.batches["batch_a"].counts.done == 1
    store.append("batch_a", [result(4)])
    store.close()
    again = BatchStore(tmp_path, BYTES_MAX)
    again.open()
    assert [bool(again.result("batch_a", n)) for n in (1, 2, 3, 4)] == [True, False, False, True]
    again.close()


def test_a_damaged_database_is_left_alone_and_named(tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(b"not a database " * 1000)
    store = BatchStore(tmp_path, 1000)
    with pytest.raises(StorageError, match=DATABASE_NAME):
        store.open()
    assert not store.is_open
    assert (tmp_path / DATABASE_NAME).read_bytes().startswith(b"not a")


def test_only_one_gateway_uses_a_folder_which_is_its_owners_alone(tmp_path: Path) -> None:
    first, second = BatchStore(tmp_path / "b", 1000), BatchStore(tmp_path / "b", 1000)
    first.open()
    with pytest.raises(StorageError, match="another gateway"):
        second.open()
    first.close()
    second.open()
    second.batches = dict.fromkeys(map(str, range(BATCHES_MAX)), batch_record("b", "f"))
    with pytest.raises(StorageError):
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


# --- folders of an earlier version ---------------------------------------------------------------------


def former_folder(folder: Path, *batches: BatchRecord) -> None:
    for name in ("", "uploads", "files", "batches"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    (folder / "lock").touch()
    (folder / "files" / "file-a.jsonl").write_bytes(content())
    record = file_record("file-a", bytes=len(content()))
    (folder / "files" / "file-a.json").write_bytes(msgspec.json.encode(record))
    (folder / "files" / "file-torn.json.new").write_bytes(b"{")
    for batch in batches:
        (folder / "batches" / f"{batch.id}.json").write_bytes(msgspec.json.encode(batch))


def test_a_former_folder_is_converted_once(tmp_path: Path) -> None:
    running = records.begin(batch_record("batch_a", "file-a"), LINES, "m", NOW)
    ended = records.fail(batch_record("batch_b", "file-a"), [], NOW)
    former_folder(tmp_path, running, ended)
    (tmp_path / "batches" / "batch_a.results").write_bytes(b"0 s 1 2 3 4 {}")
    with locked(tmp_path / "lock"), pytest.raises(StorageError, match="another gateway"):
        BatchStore(tmp_path, BYTES_MAX).open()
    for _ in range(2):
        store = BatchStore(tmp_path, BYTES_MAX)
        assert store.exists()
        store.open()
        assert store.batches == {"batch_a": running, "batch_b": ended}
        assert store.unanswered("batch_a") == [1, 2, 3, 4, 5, 6]
        assert store.content_path("file-a").read_bytes() == content()
        store.close()
    assert [path.name for path in tmp_path.rglob("*") if path.suffix in (".json", ".results", ".new")] == []


def test_a_former_folder_with_a_damaged_record_is_refused_by_its_name(tmp_path: Path) -> None:
    former_folder(tmp_path, batch_record("batch_a", "file-a"))
    (tmp_path / "batches" / "batch_a.json").write_bytes(b"{")
    store = BatchStore(tmp_path, BYTES_MAX)
    with pytest.raises(StorageError, match=r"batch_a.json is damaged: move it away"):
        store.open()
    (tmp_path / "batches" / "batch_a.json").unlink()
    store.open()
    assert (list(store.files), list(store.batches)) == (["file-a"], [])
    store.close()
