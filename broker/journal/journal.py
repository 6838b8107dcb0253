"""The journal: operations of the event loop, written by a thread in groups.

The event loop only adds operations to a bounded queue, and never waits for the disk. At the bound, and while
the disk does not take them, entries are lost to the journal, whole: an entry that lacks an operation is
removed as soon as the disk works again, and its further operations have no effect. Its answer goes on in
memory, as without a journal. Every operation has a number, and `committed` is that of the last one that is on
the disk.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from broker.journal.database import DamagedError, is_damage, remove
from broker.journal.file import Delete, Entry, JournalFile, Name, Operation

T = TypeVar("T")

log = logging.getLogger(__name__)

GROUP_S = 0.04
"""Time for which operations are collected before they are written together."""
IDLE_S = 2.0
"""Time without operations after which free space is given back."""
QUEUE_BYTES_MAX = 64 * 2**20
"""Maximum bytes of operations that wait for the disk."""
RETRY_S = 5.0
"""Time after which a disk that failed is tried again."""
LOST_MAX = 65_536
"""Maximum number of entries that are remembered as lost; beyond it, the journal starts over."""
CLOSE_S_MAX = 2.0
OPERATION_BYTES = 128

Errors = (sqlite3.Error, OSError, DamagedError)


@dataclass(frozen=True, slots=True)
class JournalStatus:
    """State of the journal for operators. `problem`: why nothing is written; empty: it works."""

    problem: str
    bytes: int
    entries: int
    queued: int
    commits: int
    operations: int
    lost: int
    errors: int
    started_over: int


class Journal:
    """The journal of one gateway. All methods but `_run` are for the event loop's thread."""

    def __init__(
        self, path: Path, bytes_max: int, *, clock: Callable[[], float] = time.time, retry_s: float = RETRY_S
    ) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        """Since the start: `commits`, `operations`, entries `lost`, `errors`, and `started_over`."""
        self.committed = 0
        self._bytes_max = bytes_max
        self._clock = clock
        self._retry_s = retry_s
        self._file: JournalFile | None = None
        self._problem = ""
        self._lost: set[Name] = set()
        self._queue: deque[tuple[Operation, int]] = deque()
        self._queued_bytes = 0
        self._number = 0
        self._condition = threading.Condition()
        self._closing = self._is_awake = self._is_untidy = False
        self._on_commit: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._open()

    # --- before the start ---

    def entries(self, kind: str) -> list[Entry]:
        """Return the entries of a kind, oldest first; none if the file is damaged."""
        return self._read(lambda file: list(file.entries(kind))) or []

    def blob(self, digest: bytes) -> bytes | None:
        """Return a blob, if it is there."""
        return self._read(lambda file: file.blob(digest))

    def _read(self, read: Callable[[JournalFile], T]) -> T | None:
        assert self._thread is None, "the thread has the file"
        if self._file is None:
            return None
        try:
            return read(self._file)
        except Errors as error:
            self._fail(error, ())
            self._open()
            return None

    def start(self, on_commit: Callable[[], None]) -> None:
        """Begin to write. `on_commit` is called by the thread after each group."""
        self._on_commit = on_commit
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # --- operations ---

    def add(self, operation: Operation, nbytes: int = 0) -> int:
        """Queue an operation with `nbytes` bytes; return its number, or 0 if it will never be written."""
        with self._condition:
            name = operation.name
            if name in self._lost:
                return 0
            size = OPERATION_BYTES + nbytes
            is_small = isinstance(operation, Delete)
            if self._problem or (not is_small and self._queued_bytes + size > QUEUE_BYTES_MAX):
                self._lose([name])
                return 0
            self._number += 1
            if not self._queue:  # the others of its group need not wake the thread
                self._condition.notify()
            self._queue.append((operation, size))
            self._queued_bytes += size
            return self._number

    def _lose(self, names: Iterable[Name]) -> None:
        for name in names:
            if name not in self._lost:
                self.counts["lost"] += 1
                self._lost.add(name)

    def status(self) -> JournalStatus:
        file, counts = self._file, self.counts
        return JournalStatus(
            problem=self._problem,
            bytes=file.nbytes if file else 0,
            entries=len(file) if file else 0,
            queued=len(self._queue),
            commits=counts["commits"],
            operations=counts["operations"],
            lost=counts["lost"] + (file.refused if file else 0),
            errors=counts["errors"],
            started_over=counts["started_over"],
        )

    def wake(self) -> None:
        """Try a disk that failed again now."""
        with self._condition:
            self._is_awake = True
            self._condition.notify()

    def close(self) -> None:
        """Write what is queued, and end the thread, within `CLOSE_S_MAX`."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)
        if self._file is not None and (self._thread is None or not self._thread.is_alive()):
            self._file.close()
            self._file = None

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._condition:
                timeout_s = self._retry_s if self._problem else IDLE_S if self._is_untidy else None
                self._condition.wait_for(lambda: self._closing or self._queue or self._is_awake, timeout_s)
                self._is_awake = False
                if self._queue and not self._closing:
                    self._condition.wait_for(lambda: self._closing, GROUP_S)
                queued, self._queue = self._queue, deque()
                number = self._number
                if self._closing and not queued:
                    return
            if queued or self._problem or self._file is None:
                self._write([operation for operation, _ in queued], number)
            else:
                self._tidy(self._file)
            with self._condition:
                self._queued_bytes -= sum(size for _, size in queued)
            self._on_commit()

    def _tidy(self, file: JournalFile) -> None:
        self._is_untidy = False
        try:
            file.tidy()
        except Errors as error:
            self._fail(error, ())

    def _write(self, operations: Sequence[Operation], number: int) -> None:
        try:
            if self._file is not None and not self._file.is_there:
                self._start_over("the file was deleted")
            if self._file is None:
                self._open()
            if self._file is None:
                with self._condition:
                    self._lose(operation.name for operation in operations)
                return
            with self._condition:
                lost = list(self._lost)
            self._file.apply([*operations, *map(Delete, lost)], self._clock())
            with self._condition:
                self._lost.difference_update(lost)
            self.counts["commits"] += 1
            self._is_untidy = True
            self.counts["operations"] += len(operations)
            self.committed = max(self.committed, number)
        except Errors as error:
            self._fail(error, operations)

    def _open(self) -> None:
        """Open the file, and remove from it what was lost meanwhile."""
        try:
            try:
                self._file = JournalFile(self.path, self._bytes_max, self._clock())
            except Errors as error:
                if not is_damage(error):
                    raise
                self._start_over(str(error))
                self._file = JournalFile(self.path, self._bytes_max, self._clock())
            if len(self._lost) > LOST_MAX:
                self._file.close()
                self._start_over("too many entries were lost")
                self._file = JournalFile(self.path, self._bytes_max, self._clock())
            with self._condition:
                lost = list(self._lost)
            self._file.apply([Delete(name) for name in lost], self._clock())
            with self._condition:
                self._lost.difference_update(lost)
                if self._problem:
                    log.info("the journal %s works again", self.path)
                self._problem = ""
        except Errors as error:
            self._fail(error, ())

    def _start_over(self, why: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self.counts["started_over"] += 1
        log.warning("the journal %s starts over: %s", self.path, why)
        remove(self.path)

    def _fail(self, error: Exception, operations: Sequence[Operation]) -> None:
        """Give the file up for now; what was to be written is lost to the journal."""
        self.counts["errors"] += 1
        problem = str(error) or type(error).__name__
        if self._file is not None:
            with contextlib.suppress(sqlite3.Error):
                self._file.close()
            self._file = None
        with self._condition:
            if not self._problem:
                log.warning(
                    "the journal %s cannot be written, answers are kept in memory only: %s",
                    self.path,
                    problem,
                )
            self._problem = problem
            self._lose(operation.name for operation in operations)
        if is_damage(error):
            with contextlib.suppress(OSError):
                self._start_over(problem)
