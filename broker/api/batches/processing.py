"""Work on whole files of batches: validation, reading of lines, and result files. On the store's thread."""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from broker.api.batches import records
from broker.api.batches.lines import FileCheck, Line, read_line, unanswered
from broker.api.batches.records import BatchRecord, Dialect, FileRecord, LineFault, Purpose
from broker.api.batches.store import BatchStore
from protocol.common.text_files import EncodingError, without_mark

RESULTS_SHARE = 1.5
"""Bytes that result files may take, as a share of the store's: for a moment they exist beside the log."""

RESULT_FILES: dict[Dialect, list[tuple[str, Purpose, tuple[bool, ...]]]] = {
    "openai": [("output", "batch_output", (True,)), ("error", "batch_output", (False,))],
    "anthropic": [("results", "message_batch_results", (True, False))],
}
"""Result files of each API: name, purpose, and whether they have the lines that succeeded and those that did
not."""


@dataclass(slots=True)
class LineIndex:
    """Where the lines of a file are: offset and size of each."""

    path: Path
    offsets: array[int]
    sizes: array[int]

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, number: int) -> bytes:
        """Return a line, by its number from 1. Raises `OSError`."""
        with self.path.open("rb") as file:
            file.seek(self.offsets[number - 1])
            return file.read(self.sizes[number - 1])


def index_lines(path: Path) -> LineIndex:
    """Find the lines of a file; empty ones are none. Raises `OSError`."""
    index = LineIndex(path, array("Q"), array("Q"))
    with path.open("rb") as file:
        offset = file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
        for raw in file:
            if raw.strip():
                index.offsets.append(offset)
                index.sizes.append(len(raw))
            offset += len(raw)
    return index


def prepare(
    store: BatchStore, id: str, line_bytes_max: int, now: float
) -> tuple[LineIndex, list[int]] | None:
    """Return the lines of a batch, and the numbers of those that have no result. A new batch is validated
    first, and None is returned if it cannot run. Raises `StorageError` or `OSError`."""
    batch = store.batches[id]
    index = index_lines(store.content_path(batch.input_file_id))
    if batch.status == "validating" and not _validate(store, batch, index, line_bytes_max, now):
        return None
    return index, store.unanswered(id)


def _validate(
    store: BatchStore, batch: BatchRecord, index: LineIndex, line_bytes_max: int, now: float
) -> bool:
    """Check the lines of a batch, and store whether it can run."""
    check = FileCheck(batch.dialect, batch.endpoint)
    with index.path.open("rb") as file:
        for offset, size in zip(index.offsets, index.sizes, strict=True):
            file.seek(offset)
            if size > line_bytes_max:
                check.refuse("line_too_large", f"The line has {size} bytes, more than {line_bytes_max}.")
            else:
                check.add(file.read(size))
    check.end()
    if (fault := _encoding_fault(index.path)) is not None:
        check.faults = [fault]
    if check.faults:
        store.put(records.fail(batch, check.faults, now))
        return False
    store.put(records.begin(batch, check.total, check.model, now))
    return True


def _encoding_fault(path: Path) -> LineFault | None:
    """Return why no line of a file can be read; None if it may be UTF-8. Raises `OSError`."""
    try:
        with path.open("rb") as file:
            without_mark(file.read(4))
    except EncodingError as error:
        return LineFault(code="invalid_json_line", message=f"The file cannot be read: {error}.")
    return None


def read(store: BatchStore, batch: BatchRecord, index: LineIndex, number: int) -> Line:
    """Return a line of a validated file. Raises `OSError`."""
    return read_line(index.read(number), number, batch.dialect, batch.endpoint)


def finalize(store: BatchStore, id: str, index: LineIndex, retention_s: int, now: float) -> None:
    """Write the result files of a batch, and end it; repeatable. Raises `StorageError` or `OSError`."""
    batch = store.batches[id]
    counts = batch.counts
    left = counts.total - counts.done
    if batch.ending != "completed":
        counts = replace(counts, **{batch.ending: left})
    made: list[FileRecord | None] = []
    for kind, purpose, wanted in RESULT_FILES[batch.dialect]:
        file = FileRecord(
            id=batch.result_file_id(kind),
            owner=batch.owner,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=purpose,
            bytes=0,
            created_at=int(now),
            expires_at=int(now) + (batch.output_expires_s or retention_s),
        )
        made.append(_write(store, file, _documents(store, batch, index, wanted)))
    output, errors = (None if file is None else file.id for file in (*made, None)[:2])
    ended = records.finish(batch, counts, output, errors, now)
    store.put(ended, *(file for file in made if file is not None))


def _documents(
    store: BatchStore, batch: BatchRecord, index: LineIndex, wanted: tuple[bool, ...]
) -> Iterator[bytes]:
    """Yield the result lines of a batch that succeeded or did not, as `wanted`, in the order of its lines."""
    for number in range(1, batch.counts.total + 1):
        found = store.result(batch.id, number)
        if found is None:
            document = unanswered(batch, read(store, batch, index, number))
            found = (False, document) if document is not None else None
        if found is not None and found[0] in wanted:
            yield found[1]


def _write(store: BatchStore, record: FileRecord, documents: Iterator[bytes]) -> FileRecord | None:
    """Write the content of a result file, and return its record; None if it would be empty."""
    first = next(documents, None)
    if first is None:
        return None
    upload = store.begin_upload(record.id)
    try:
        store.write(upload, first + b"\n", RESULTS_SHARE)
        for document in documents:
            store.write(upload, document + b"\n", RESULTS_SHARE)
        return store.settle(upload, record)
    finally:
        store.abandon(upload)  # it has no effect on a file that is complete
