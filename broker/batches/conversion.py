"""Conversion of a batch folder of an earlier version, which had records and results in files of their own.

    lock                    taken by the process that uses the folder
    files/ID.json           the record of a file
    batches/ID.json         the record of a batch
    batches/ID.results      the results of one that is not over: records with checksums, in any order

Results behind a damaged one are left out, and their lines run again. A damaged record is an error.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import msgspec

from broker.batches.records import BatchRecord, FileRecord, LineResult
from broker.journal.database import DamagedError, locked

log = logging.getLogger(__name__)

T = TypeVar("T")


def lock(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the earlier version, if the folder is of one. Raises `BlockingIOError`."""
    return locked(folder / "lock") if is_former(folder) else nullcontext()


def is_former(folder: Path) -> bool:
    """Return whether the folder is one of the earlier version."""
    return (folder / "lock").exists()


def files(folder: Path) -> Iterator[FileRecord]:
    """Yield the records of files. Raises `OSError` or `DamagedError`."""
    return _records(folder / "files", FileRecord)


def batches(folder: Path) -> Iterator[tuple[BatchRecord, list[LineResult]]]:
    """Yield the batches, each with the results that it has if it is not over. Raises as `files`."""
    for batch in _records(folder / "batches", BatchRecord):
        path = folder / "batches" / f"{batch.id}.results"
        yield batch, list(_results(path)) if path.exists() and not batch.is_over else []


def remove(folder: Path) -> None:
    """Remove the files that were read. Raises `OSError`."""
    for pattern in (
        "files/*.json",
        "files/*.json.new",
        "batches/*.json",
        "batches/*.json.new",
        "batches/*.results",
    ):
        for path in list(folder.glob(pattern)):
            path.unlink()
    (folder / "lock").unlink()


def _records(folder: Path, kind: type[T]) -> Iterator[T]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedError(f"{path} is damaged: move it away to go on without it ({error})") from None


def _results(path: Path) -> Iterator[LineResult]:
    with path.open("rb") as file:
        for record in file:
            if (result := decode_result(record)) is None:
                log.warning("%s: results behind a damaged one are left out, their lines run again", path)
                return
            yield result


def decode_result(record: bytes) -> LineResult | None:
    """Return the result of a record; None if it is damaged."""
    content = record[9:-1]
    if not record.endswith(b"\n") or record[:9] != b"%08x " % zlib.crc32(content):
        return None
    parts = content.split(b" ", 6)
    if len(parts) != 7 or parts[1] not in (b"s", b"e"):
        return None
    try:
        first, cached, output, reasoning = map(int, parts[2:6])
        return LineResult(int(parts[0]), parts[1] == b"s", (first, cached, output, reasoning), parts[6])
    except ValueError:
        return None
