"""Results log of a running batch: one record for each line that has an answer, appended in any order.

A record has a checksum. What follows the first damaged record, after a power failure, is cut off when the
log is opened, and these lines run again. A line that occurs twice counts once. On the store's thread.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from msgspec.structs import replace

from broker.batches.durable import open_private
from broker.batches.records import Counts

Tokens = tuple[int, int, int, int]
"""Input, cached, output and reasoning tokens."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of line `number`: `document` is its line of the result file."""

    number: int
    is_success: bool
    tokens: Tokens
    document: bytes


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the document of a result is in the log."""

    is_success: bool
    offset: int
    size: int


def encode_record(result: LineResult) -> bytes:
    """Return the record of a result."""
    kind = b"s" if result.is_success else b"e"
    head = b"%d %s %d %d %d %d " % (result.number, kind, *result.tokens)
    content = head + result.document
    return b"%08x %s\n" % (zlib.crc32(content), content)


def decode_record(record: bytes) -> LineResult | None:
    """Return the result of a record; None if it is damaged."""
    if not record.endswith(b"\n") or len(record) < 10 or record[8:9] != b" ":
        return None
    content = record[9:-1]
    if record[:8] != b"%08x" % zlib.crc32(content):
        return None
    parts = content.split(b" ", 6)
    if len(parts) != 7 or parts[1] not in (b"s", b"e"):
        return None
    try:
        first, cached, output, reasoning = map(int, parts[2:6])
        return LineResult(int(parts[0]), parts[1] == b"s", (first, cached, output, reasoning), parts[6])
    except ValueError:
        return None


class ResultsLog:
    """The log of one batch, open for appending. `size`: its bytes."""

    def __init__(self, path: Path) -> None:
        """Open the log, or create it, and cut off its damaged end. Raises `OSError`."""
        self.path = path
        self.size = 0
        self._places: dict[int, _Place] = {}
        self._succeeded = 0
        self._tokens: list[int] = [0, 0, 0, 0]
        self._file: BinaryIO = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            self._recover()
        except OSError:
            self._file.close()
            raise

    def _recover(self) -> None:
        for record in self._file:
            result = decode_record(record)
            if result is None:
                break
            self._note(result, len(record))
        os.ftruncate(self._file.fileno(), self.size)

    def _note(self, result: LineResult, nbytes: int) -> None:
        at = self.size + nbytes - 1 - len(result.document)
        if result.number not in self._places:
            self._places[result.number] = _Place(result.is_success, at, len(result.document))
            self._succeeded += result.is_success
            self._tokens = [a + b for a, b in zip(self._tokens, result.tokens, strict=True)]
        self.size += nbytes

    def __contains__(self, number: object) -> bool:
        """Return whether the line has a result."""
        return number in self._places

    def append(self, results: Sequence[LineResult]) -> None:
        """Append results; they are on the disk when this returns. Raises `OSError`; then none is."""
        records = [encode_record(result) for result in results]
        try:
            self._write(b"".join(records))
        except OSError:
            os.ftruncate(self._file.fileno(), self.size)
            raise
        for result, record in zip(results, records, strict=True):
            self._note(result, len(record))

    def _write(self, content: bytes) -> None:
        # Not through the file's buffer, which would try again to write what could not be written.
        left, at = memoryview(content), self.size
        while left:
            count = os.pwrite(self._file.fileno(), left, at)
            left, at = left[count:], at + count
        os.fsync(self._file.fileno())

    def counts(self, before: Counts) -> Counts:
        """Return the counts of the batch with these results."""
        read, cached, output, reasoning = self._tokens
        return replace(
            before,
            succeeded=self._succeeded,
            errored=len(self._places) - self._succeeded,
            input_tokens=read,
            cached_tokens=cached,
            output_tokens=output,
            reasoning_tokens=reasoning,
        )

    def document(self, number: int) -> tuple[bool, bytes] | None:
        """Return whether a line succeeded, and its result line; None: it has no result. Raises `OSError`."""
        place = self._places.get(number)
        if place is None:
            return None
        return place.is_success, os.pread(self._file.fileno(), place.size, place.offset)

    def close(self) -> None:
        self._file.close()
