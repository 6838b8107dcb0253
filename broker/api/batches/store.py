"""Store of files and batches, in a folder of its own. Synchronous; on one thread.

    batches.sqlite          the records of files and batches, and the results of batches that are not over
    uploads/                files that are being received or written, removed when the folder is opened
    files/ID.jsonl          the content of a file

Every change is one transaction. The content of a file is complete and on the disk before its record exists,
and its record is removed before its content, so a file with a record is whole. `files` and
`batches` mirror the tables; other threads may read them, and only the store's own changes them.

Bounds: uploads may take `UPLOADS_SHARE` of `bytes_max`, results the rest. Everything has an age at which it
is deleted, unless a batch needs it that is not over.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from broker.api.batches.records import BatchRecord, FileRecord, LineResult
from broker.journal.database import DamagedError, Database, locked
from protocol.common.secure_files import is_private

log = logging.getLogger(__name__)

UPLOADS_SHARE = 0.5
FILES_MAX = 10_000
BATCHES_MAX = 10_000
DATABASE_NAME = "batches.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, number INTEGER NOT NULL, is_success INTEGER NOT NULL, document BLOB NOT NULL,
    PRIMARY KEY (batch, number));
PRAGMA user_version = 1;
"""
_file: msgspec.json.Decoder[FileRecord] = msgspec.json.Decoder(FileRecord)
_batch: msgspec.json.Decoder[BatchRecord] = msgspec.json.Decoder(BatchRecord)


class StorageError(Exception):
    """Raised if the folder cannot be used; the message is for operators and clients."""


@dataclass(slots=True)
class Upload:
    """A file that is being written."""

    path: Path
    file: BinaryIO
    size: int = 0


class BatchStore:
    """The files and batches in `folder`."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self.folder = folder
        self.files: dict[str, FileRecord] = {}
        self.batches: dict[str, BatchRecord] = {}
        self.bytes_max = bytes_max
        self.is_open = False
        """Whether all records are read."""
        self._uploading = 0
        self._database: Database | None = None

    # --- the folder ---

    @property
    def used(self) -> int:
        """Bytes of contents and results."""
        results = sum(batch.result_bytes for batch in list(self.batches.values()))
        return results + sum(file.bytes for file in list(self.files.values()))

    def exists(self) -> bool:
        """Return whether the folder holds anything."""
        return (self.folder / DATABASE_NAME).exists() or _is_former(self.folder)

    def open(self) -> None:
        """Create the folder if it is missing, lock it, and read all records. Idempotent.

        Raises `OSError`, and `StorageError` if the folder cannot be used.
        """
        if self.is_open:
            return
        for name in ("", "uploads", "files"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(self.folder):
            raise StorageError(f"{self.folder} must be a folder of your own with mode 0700")
        path = self.folder / DATABASE_NAME
        try:
            with ExitStack() as failed, _former_lock(self.folder):
                failed.callback(self.close)
                self._database = Database(path, _SCHEMA)
                self._read()
                self.is_open = True
                failed.pop_all()
        except BlockingIOError:
            raise StorageError(f"another gateway uses {self.folder}") from None
        except (sqlite3.Error, DamagedError, msgspec.DecodeError) as error:
            raise StorageError(f"{path} cannot be used: {error}") from None

    def _read(self) -> None:
        if _is_former(self.folder):
            self._convert()
        files, batches = (self._run(f"SELECT id, record FROM {table}") for table in ("files", "batches"))
        self.files = {id: _file.decode(record) for id, record in files}
        self.batches = {id: _batch.decode(record) for id, record in batches}
        for path in (self.folder / "uploads").iterdir():
            path.unlink()
        for path in list((self.folder / "files").iterdir()):
            if path.stem not in self.files:
                path.unlink()

    def _convert(self) -> None:
        """Take over what an earlier version has left in files of its own."""
        self.put(*_former_records(self.folder))
        log.warning("%s is converted; of batches that are not over, all lines run again", self.folder)
        _remove_former(self.folder)

    def close(self) -> None:
        """Release the folder."""
        self.is_open = False
        database, self._database = self._database, None
        if database is not None:
            database.close()

    # --- the tables ---

    def _run(self, statement: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor:
        assert self._database is not None
        return self._database.run(statement, parameters)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write all that the block runs; it is on the disk when this returns. Raises `StorageError`."""
        assert self._database is not None
        try:
            with self._database.transaction():
                yield
        except sqlite3.Error as error:
            raise StorageError(f"The server cannot store this: {error}.") from None

    def put(self, *records: FileRecord | BatchRecord) -> None:
        """Store records, new ones or the next states of some, all or none. They are on the disk when this
        returns. Raises `StorageError`."""
        ids = {record.id for record in records if isinstance(record, BatchRecord)}
        if ids - self.batches.keys() and len(self.batches) >= BATCHES_MAX:
            raise StorageError(f"There are {BATCHES_MAX} batches already.")
        with self._transaction():
            for record in records:
                self._insert(record)
        for record in records:
            if isinstance(record, FileRecord):
                self.files[record.id] = record
            else:
                self.batches[record.id] = record

    def _insert(self, record: FileRecord | BatchRecord) -> None:
        table = "files" if isinstance(record, FileRecord) else "batches"
        self._run(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (record.id, msgspec.json.encode(record)))
        if isinstance(record, BatchRecord) and record.is_over:
            self._run("DELETE FROM results WHERE batch = ?", (record.id,))

    # --- files ---

    def begin_upload(self, name: str) -> Upload:
        """Return a new file to write to. Raises `StorageError` or `OSError`."""
        self.open()
        if len(self.files) >= FILES_MAX:
            raise StorageError(f"There are {FILES_MAX} files already; delete some.")
        path = self.folder / "uploads" / name
        return Upload(path, open(path, "wb", opener=_private))

    def write(self, upload: Upload, data: bytes, share: float = UPLOADS_SHARE) -> None:
        """Append to a file. `share`: of the store's bytes that all files may take.

        Raises `StorageError` or `OSError`.
        """
        if self.used + self._uploading + len(data) > share * self.bytes_max:
            raise StorageError("The files of batches take all the space that they may; delete some.")
        upload.file.write(data)
        upload.size += len(data)
        self._uploading += len(data)

    def commit(self, upload: Upload, record: FileRecord) -> FileRecord:
        """Add a complete file. It is on the disk when this returns. Raises `StorageError` or `OSError`."""
        record = self.settle(upload, record)
        self.put(record)
        return record

    def settle(self, upload: Upload, record: FileRecord) -> FileRecord:
        """Write the content of a complete file to the disk, and return its record. Raises `OSError`."""
        upload.file.flush()
        os.fsync(upload.file.fileno())
        upload.file.close()
        upload.path.replace(self.content_path(record.id))
        _sync_folder(self.folder / "files")
        self._uploading -= upload.size
        size, upload.size = upload.size, 0
        return replace(record, bytes=size)

    def abandon(self, upload: Upload) -> None:
        """Remove a file that was not committed. Idempotent."""
        self._uploading -= upload.size
        upload.size = 0
        try:
            upload.file.close()
        except OSError:  # a buffer that cannot be written: the descriptor is closed all the same
            log.debug("%s: closed with unwritten data", upload.path)
        upload.path.unlink(missing_ok=True)

    def content_path(self, id: str) -> Path:
        """Return the path of a file's content."""
        return self.folder / "files" / f"{id}.jsonl"

    def is_in_use(self, id: str) -> bool:
        """Return whether a batch that is not over reads this file."""
        return any(batch.input_file_id == id and not batch.is_over for batch in self.batches.values())

    def delete_file(self, id: str) -> None:
        """Delete a file. Unknown ids are ignored. Raises `StorageError` or `OSError`."""
        if id in self.files:
            with self._transaction():
                self._run("DELETE FROM files WHERE id = ?", (id,))
            del self.files[id]
            self.content_path(id).unlink(missing_ok=True)

    # --- batches ---

    def append(self, id: str, results: Sequence[LineResult]) -> None:
        """Add results to a batch. Raises `StorageError`; then none is stored."""
        size = sum(len(result.document) for result in results)
        if self.used + size > self.bytes_max:
            raise StorageError("The results of batches take all the space that they may.")
        insert = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)"
        with self._transaction():
            added = [
                each
                for each in results
                if self._run(insert, (id, each.number, each.is_success, each.document)).rowcount
            ]
            batch = self.batches[id].with_results(added)
            self._insert(batch)
        self.batches[id] = batch

    def unanswered(self, id: str) -> list[int]:
        """Return the numbers of the lines that have no result."""
        rows = self._run("SELECT number FROM results WHERE batch = ?", (id,))
        answered = {number for (number,) in rows}
        total = self.batches[id].counts.total
        return [number for number in range(1, total + 1) if number not in answered]

    def result(self, id: str, number: int) -> tuple[bool, bytes] | None:
        """Return whether a line succeeded, and its line of the result file; None: it has no result."""
        row = self._run(
            "SELECT is_success, document FROM results WHERE batch = ? AND number = ?", (id, number)
        ).fetchone()
        return None if row is None else (bool(row[0]), row[1])

    def delete_batch(self, id: str) -> None:
        """Delete a batch that is over, and the files that only it has. Raises `StorageError` or `OSError`."""
        batch = self.batches.get(id)
        if batch is None:
            return
        with self._transaction():
            self._run("DELETE FROM batches WHERE id = ?", (id,))
        del self.batches[id]
        if batch.dialect == "anthropic":
            for file in (batch.input_file_id, batch.output_file_id):
                self.delete_file(file or "")

    def expire(self, now: float, age_s_max: float) -> None:
        """Delete what is too old. `age_s_max`: of a batch since its end. Raises as `delete_batch`."""
        for batch in list(self.batches.values()):
            if batch.is_over and max(batch.entered.values()) + age_s_max < now:
                self.delete_batch(batch.id)
        for file in list(self.files.values()):
            if file.expires_at < now and not self.is_in_use(file.id):
                self.delete_file(file.id)


def _private(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Records of a batch folder of an earlier version, which had them in files of their own -----------
#
#     lock                    taken by the process that uses the folder
#     files/ID.json           the record of a file
#     batches/ID.json         the record of a batch
#     batches/ID.results      the results of one that is not over: not taken over, its lines run again


def _is_former(folder: Path) -> bool:
    """Return whether the folder is one of the earlier version."""
    return (folder / "lock").exists()


def _former_lock(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the earlier version, if the folder is of one. Raises `BlockingIOError`."""
    return locked(folder / "lock") if _is_former(folder) else nullcontext()


def _former_records(folder: Path) -> Iterator[FileRecord | BatchRecord]:
    """Yield all records. Raises `OSError`, or `DamagedError` naming one that cannot be read."""
    for path in sorted([*folder.glob("files/*.json"), *folder.glob("batches/*.json")]):
        decoder = _file if path.parent.name == "files" else _batch
        try:
            yield decoder.decode(path.read_bytes())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedError(f"{path} is damaged: move it away to go on without it ({error})") from None


def _remove_former(folder: Path) -> None:
    """Remove what was read. Raises `OSError`."""
    for pattern in ("files/*.json", "batches/*", "lock"):
        for path in list(folder.glob(pattern)):
            path.unlink()
