"""Store of files and batches, in a folder of its own. Synchronous; on one thread.

    lock                    taken by the process that uses the folder
    uploads/                files that are being received or written, removed when the folder is opened
    files/ID.json, .jsonl   a file: its record and its content
    batches/ID.json         a batch
    batches/ID.results      its results log, until it is over

A record is replaced atomically. The content of a file is complete and on the disk before its record exists,
and its record is removed before its content, so a file with a record is whole. `files` and `batches` mirror
the records; other threads may read them, and only the store's own changes them.

Bounds: uploads may take `UPLOADS_SHARE` of `bytes_max`, results the rest. Everything has an age at which it
is deleted, unless a batch needs it that is not over.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from broker.batches.durable import open_private, settle, sync_folder, write_file
from broker.batches.records import BatchRecord, FileRecord
from broker.batches.results import LineResult, ResultsLog
from protocol.secure_files import is_private

log = logging.getLogger(__name__)

UPLOADS_SHARE = 0.5
FILES_MAX = 10_000
BATCHES_MAX = 10_000

T = TypeVar("T")


class StorageError(Exception):
    """Raised if the folder cannot be used; the message is for operators and clients."""


class StorageFullError(StorageError):
    """Raised if a bound of the store, or the disk, leaves no room."""


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
        self.is_open = False
        self.used = 0
        """Bytes of contents and results."""
        self.bytes_max = bytes_max
        self._uploading = 0
        self._logs: dict[str, ResultsLog] = {}
        self._lock: BinaryIO | None = None

    # --- the folder ---

    def exists(self) -> bool:
        """Return whether the folder holds anything."""
        return (self.folder / "lock").exists()

    def open(self) -> None:
        """Create the folder if it is missing, lock it, and read all records. Idempotent.

        Raises `StorageError` if another process uses it, or others can enter it, and `OSError`.
        """
        if self.is_open:
            return
        for name in ("", "uploads", "files", "batches"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(self.folder):
            raise StorageError(f"{self.folder} must be a folder of your own with mode 0700")
        self._take_lock()
        try:
            self._read()
        except OSError:
            self.close()
            raise
        self.is_open = True

    def _take_lock(self) -> None:
        self._lock = open_private(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise StorageError(f"another gateway uses {self.folder}") from None

    def _read(self) -> None:
        for path in (self.folder / "uploads").iterdir():
            path.unlink()
        self.files = {record.id: record for record in _records(self.folder / "files", FileRecord)}
        self.batches = {record.id: record for record in _records(self.folder / "batches", BatchRecord)}
        over = {batch.id for batch in self.batches.values() if batch.is_over}
        _remove_orphans(self.folder / "files", ".jsonl", set())
        _remove_orphans(self.folder / "batches", ".results", over)
        self.used = sum(file.bytes for file in self.files.values())
        for id in self.batches.keys() - over:
            self.results(id)

    def close(self) -> None:
        """Release the folder."""
        for results in self._logs.values():
            results.close()
        self._logs.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self.is_open = False

    # --- files ---

    def begin_upload(self, name: str) -> Upload:
        """Return a new file to write to. Raises `StorageError` or `OSError`."""
        self.open()
        if len(self.files) >= FILES_MAX:
            raise StorageFullError(f"There are {FILES_MAX} files already; delete some.")
        path = self.folder / "uploads" / name
        return Upload(path, open_private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC))

    def write(self, upload: Upload, data: bytes, share: float = UPLOADS_SHARE) -> None:
        """Append to a file. `share`: of the store's bytes that all files may take.

        Raises `StorageFullError` or `OSError`.
        """
        if self.used + self._uploading + len(data) > share * self.bytes_max:
            raise StorageFullError("The files of batches take all the space that they may; delete some.")
        upload.file.write(data)
        upload.size += len(data)
        self._uploading += len(data)

    def commit(self, upload: Upload, record: FileRecord) -> FileRecord:
        """Add a complete file. It is on the disk when this returns. Raises `OSError`."""
        upload.file.close()
        record = msgspec.structs.replace(record, bytes=upload.size)
        settle(upload.path, self.content_path(record.id))
        write_file(self._file_path(record.id), msgspec.json.encode(record))
        self._uploading -= upload.size
        before = self.files.get(record.id)
        self.used += upload.size - (before.bytes if before else 0)
        upload.size = 0
        self.files[record.id] = record
        return record

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

    def _file_path(self, id: str) -> Path:
        return self.folder / "files" / f"{id}.json"

    def is_in_use(self, id: str) -> bool:
        """Return whether a batch that is not over reads this file."""
        return any(batch.input_file_id == id and not batch.is_over for batch in self.batches.values())

    def delete_file(self, id: str) -> None:
        """Delete a file. Unknown ids are ignored. Raises `OSError`."""
        record = self.files.pop(id, None)
        if record is not None:
            self._file_path(id).unlink(missing_ok=True)
            sync_folder(self.folder / "files")
            self.content_path(id).unlink(missing_ok=True)
            self.used -= record.bytes

    # --- batches ---

    def put(self, batch: BatchRecord) -> None:
        """Store a new batch, or the next state of one. It is on the disk when this returns.

        Raises `StorageError` or `OSError`.
        """
        if batch.id not in self.batches and len(self.batches) >= BATCHES_MAX:
            raise StorageFullError(f"There are {BATCHES_MAX} batches already.")
        write_file(self.folder / "batches" / f"{batch.id}.json", msgspec.json.encode(batch))
        self.batches[batch.id] = batch
        if batch.is_over:
            self._drop_results(batch.id)

    def results(self, id: str) -> ResultsLog:
        """Return the results log of a batch that is not over. Raises `OSError`."""
        found = self._logs.get(id)
        if found is None:
            found = self._logs[id] = ResultsLog(self.folder / "batches" / f"{id}.results")
            self.used += found.size
        return found

    def append(self, id: str, found: list[LineResult]) -> None:
        """Append results to a batch. Raises `StorageFullError` or `OSError`; then none is stored."""
        results = self.results(id)
        if self.used + sum(len(result.document) for result in found) > self.bytes_max:
            raise StorageFullError("The results of batches take all the space that they may.")
        before = results.size
        results.append(found)
        self.used += results.size - before

    def _drop_results(self, id: str) -> None:
        results = self._logs.pop(id, None)
        if results is not None:
            self.used -= results.size
            results.close()
            results.path.unlink(missing_ok=True)

    def delete_batch(self, id: str) -> None:
        """Delete a batch that is over, and the files that only it has. Raises `OSError`."""
        batch = self.batches.pop(id, None)
        if batch is None:
            return
        (self.folder / "batches" / f"{id}.json").unlink(missing_ok=True)
        sync_folder(self.folder / "batches")
        if batch.dialect == "anthropic":
            for file in (batch.input_file_id, batch.output_file_id):
                self.delete_file(file or "")

    def expire(self, now: float, age_s_max: float) -> None:
        """Delete what is too old. `age_s_max`: of a batch since its end. Raises `OSError`."""
        for batch in list(self.batches.values()):
            if batch.is_over and max(batch.entered.values()) + age_s_max < now:
                self.delete_batch(batch.id)
        for file in list(self.files.values()):
            if file.expires_at < now and not self.is_in_use(file.id):
                self.delete_file(file.id)


def _records(folder: Path, kind: type[T]) -> Iterator[T]:
    """Yield the records in a folder; a damaged one is reported and left alone."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("%s is damaged and ignored: %s", path, error)


def _remove_orphans(folder: Path, suffix: str, without: Collection[str]) -> None:
    """Remove incomplete records, and files with this suffix that have no record, or one of `without`."""
    owners = {path.stem for path in folder.glob("*.json")} - set(without)
    for path in list(folder.iterdir()):
        if path.suffix == ".new" or (path.suffix == suffix and path.stem not in owners):
            path.unlink()
