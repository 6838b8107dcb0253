"""The journal: operations of the event loop, written by a thread in groups.

The event loop only adds operations to a bounded queue, and never waits for the disk. At the bound, and while
the disk does not take them, entries are lost to the journal, whole: an entry that lacks an operation is
removed as soon as the disk works again, and its further operations have no effect. Its answer goes on in
memory, as without a journal. Every operation has a number, and `committed` is that of the last one that is on
the disk.

Entries of a kind with a quota can be read by their name at any time, by another thread: as they are in the
file, with the operations that are still queued. What the disk does not take of them stays in the queue, and
at its bound the oldest are lost. Without a file everything is in memory.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from broker.journal.database import DamagedError, is_damage, remove
from broker.journal.file import (
    Append,
    Delete,
    Entry,
    JournalFile,
    Name,
    Operation,
    Put,
    Quota,
    Replace,
    StoredEntry,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

GROUP_S = 0.04
"""Time for which operations are collected before they are written together."""
IDLE_S = 2.0
"""Time without operations after which free space is given back."""
EXPIRE_S = 3600.0
"""Time without operations after which entries that are too old are looked for."""
QUEUE_BYTES_MAX = 64 * 2**20
"""Maximum bytes of operations that wait for the disk, beside those of a kind's quota."""
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
    """The journal of one gateway. All methods but `read` and `_run` are for the event loop's thread."""

    def __init__(
        self,
        path: Path | None,
        bytes_max: int,
        quotas: Mapping[str, Quota] | None = None,
        *,
        clock: Callable[[], float] = time.time,
        retry_s: float = RETRY_S,
    ) -> None:
        """`path`: None keeps everything in memory. `quotas`: of the kinds whose entries can be read."""
        self.path = path
        self._quotas = quotas or {}
        self._pending: dict[Name, list[Operation]] = {}
        """Queued operations of entries that can be read."""
        self._reading = threading.Lock()
        """Held while an entry is read, and while the file is closed."""
        self.counts: Counter[str] = Counter()
        """Since the start: `commits`, `operations`, entries `lost`, `errors`, and `started_over`."""
        self.committed = 0
        self._bytes_max = bytes_max
        self._clock = clock
        self._retry_s = retry_s
        self._file: JournalFile | None = None
        self._problem = ""
        self._damage = ""
        """What is wrong with the file, if an entry could not be read."""
        self._lost: set[Name] = set()
        self._queue: deque[tuple[Operation, int]] = deque()
        self._queued_bytes = 0
        self._number = 0
        self._condition = threading.Condition()
        self._closing = self._is_awake = self._is_untidy = False
        self._on_commit: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        if path is not None:
            self._open()

    @property
    def is_durable(self) -> bool:
        """Whether it is on a disk."""
        return self.path is not None

    # --- before the start ---

    def entries(self, kind: str) -> list[Entry]:
        """Return the entries of a kind, oldest first; none if the file is damaged."""
        return self._read(lambda file: list(file.entries(kind))) or []

    def blob(self, digest: bytes) -> bytes | None:
        """Return a blob, if it is there."""
        return self._read(lambda file: file.blob(digest))

    def rename_owners(self, names: Mapping[str, str]) -> None:
        """Give what owners have, by their names, to others."""
        self._read(lambda file: file.rename_owners(names))

    def _read(self, read: Callable[[JournalFile], T]) -> T | None:
        assert self._thread is None, "the thread has the file"
        if self._file is None:
            return None
        try:
            return read(self._file)
        except Errors as error:
            self._fail(error)
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
            quota = self._quotas.get(name[0])
            bytes_max = QUEUE_BYTES_MAX + (quota.bytes_max if quota else 0)
            is_full = not isinstance(operation, Delete) and self._queued_bytes + size > bytes_max
            if quota is not None:
                if is_full:
                    self._drop_oldest()
                self._pending.setdefault(name, []).append(operation)
            elif is_full or self._problem:
                self._lose([name])
                return 0
            self._number += 1
            if not self._queue:  # the others of its group need not wake the thread
                self._condition.notify()
            self._queue.append((operation, size))
            self._queued_bytes += size
            return 0 if self._problem else self._number

    def _lose(self, names: Iterable[Name]) -> None:
        for name in names:
            if name not in self._lost:
                self.counts["lost"] += 1
                self._lost.add(name)

    def _drop_oldest(self) -> None:
        """Lose the older half of the entries that can be read and are in the queue."""
        names = list(self._pending)[: (len(self._pending) + 1) // 2]
        self._lose(names)
        for name in names:
            del self._pending[name]
        self._queued_bytes -= sum(size for operation, size in self._queue if operation.name in self._lost)
        self._queue = deque(each for each in self._queue if each[0].name not in self._lost)

    def read(self, name: Name) -> StoredEntry | None:
        """Return an entry of a kind with a quota, with all that was added so far; None if there is none.

        Waits for the disk: call this on another thread than the event loop's. Raises `OSError` if the disk
        cannot be read.
        """
        with self._condition:
            pending = list(self._pending.get(name, ()))
        whole = [n for n, operation in enumerate(pending) if isinstance(operation, Put | Delete)]
        found = None if whole else self._read_file(name)
        for operation in pending[whole[-1] :] if whole else pending:
            found = _apply(found, operation)
        return found

    def _read_file(self, name: Name) -> StoredEntry | None:
        try:
            with self._reading:
                if self._file is None and self.path is None:
                    return None  # nothing was written yet
                if self._file is None:
                    raise OSError(self._problem or "the journal is closed")
                return self._file.read(name)
        except (sqlite3.Error, DamagedError) as error:
            if is_damage(error):
                self._damage = str(error)
                self.wake()
            raise OSError(str(error)) from None

    def status(self) -> JournalStatus:
        file, counts = self._file, self.counts
        return JournalStatus(
            problem=self._problem,
            bytes=file.nbytes if file else 0,
            entries=file.count if file else 0,
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
        if self._thread is None or not self._thread.is_alive():
            self._close_file()

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._condition:
                timeout_s = self._retry_s if self._problem else self._idle_s()
                self._condition.wait_for(
                    lambda: self._closing or self._is_awake or (self._queue and not self._problem), timeout_s
                )
                self._is_awake = False
                if self._queue and not self._closing:
                    self._condition.wait_for(lambda: self._closing, GROUP_S)
                queued, self._queue = self._queue, deque()
                number = self._number
                if self._closing and not queued:
                    return
            is_idle = not queued and not self._problem and not self._damage
            if is_idle and self._is_untidy and self._file is not None:
                self._tidy(self._file)
            elif self._write([operation for operation, _ in queued]):
                self._forget(queued, number)
            else:
                self._put_back(queued)
                if self._closing:
                    return
            self._on_commit()

    def _idle_s(self) -> float:
        is_done = not self._is_untidy and (self._file is None or not self._file.overdue)
        return EXPIRE_S if is_done else IDLE_S

    def _put_back(self, queued: Iterable[tuple[Operation, int]]) -> None:
        """Keep what the disk has not taken of entries that can be read; the others are lost."""
        with self._condition:
            kept = [each for each in queued if each[0].name in self._pending]
            self._lose(operation.name for operation, _ in queued if operation.name not in self._pending)
            self._queue.extendleft(reversed(kept))
            self._queued_bytes = sum(size for _, size in self._queue)

    def _forget(self, written: Iterable[tuple[Operation, int]], number: int) -> None:
        """Take operations that were written, up to `number`, off the account."""
        with self._condition:
            for operation, size in written:
                self._queued_bytes -= size
                if (pending := self._pending.get(operation.name)) is not None:
                    del pending[0]
                    if not pending:
                        del self._pending[operation.name]
            self.committed = number

    def _tidy(self, file: JournalFile) -> None:
        self._is_untidy = False
        try:
            file.tidy()
        except Errors as error:
            self._fail(error)

    def _write(self, operations: Sequence[Operation]) -> bool:
        """Write a group, and remove what was lost. Return False if the disk has not taken it."""
        try:
            if self._file is not None and (self._damage or not self._file.is_there):
                self._start_over(self._damage or "the file was deleted")
            if self._file is None:
                self._open()
            if self._file is None:
                return False
            with self._condition:
                lost = list(self._lost)
            with self._reading if self.path is None else contextlib.nullcontext():
                self._file.apply([*operations, *map(Delete, lost)], self._clock())
        except Errors as error:
            self._fail(error)
            return False
        with self._condition:
            self._lost.difference_update(lost)
            if self._problem:
                log.info("the journal %s works again", self.path)
            self._problem = ""
        self._is_untidy = True
        self.counts["commits"] += 1
        self.counts["operations"] += len(operations)
        return True

    def _open(self) -> None:
        """Open the file; one that is damaged starts over."""
        try:
            try:
                self._file = self._new_file()
            except Errors as error:
                if not is_damage(error):
                    raise
                self._start_over(str(error))
                self._file = self._new_file()
            if len(self._lost) > LOST_MAX:
                self._start_over("too many entries were lost")
                self._file = self._new_file()
        except Errors as error:
            self._fail(error)

    def _new_file(self) -> JournalFile:
        return JournalFile(self.path, self._bytes_max, self._clock(), self._quotas)

    def _close_file(self) -> None:
        with self._reading:
            if self._file is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._file.close()
                self._file = None

    def _start_over(self, why: str) -> None:
        self._close_file()
        self._damage = ""
        self.counts["started_over"] += 1
        log.warning("the journal %s starts over: %s", self.path, why)
        if self.path is not None:
            remove(self.path)

    def _fail(self, error: Exception) -> None:
        """Give the file up for now."""
        self.counts["errors"] += 1
        problem = str(error) or type(error).__name__
        self._close_file()
        with self._condition:
            if not self._problem:
                log.warning(
                    "the journal %s cannot be written, answers are kept in memory only: %s",
                    self.path,
                    problem,
                )
            self._problem = problem
        if is_damage(error):
            with contextlib.suppress(OSError):
                self._start_over(problem)


def _apply(entry: StoredEntry | None, operation: Operation) -> StoredEntry | None:
    """Return an entry behind an operation, which may be in it already: no two of its items are equal."""
    match operation:
        case Put(_, head, blobs):
            return StoredEntry(head, [], blobs)
        case Append(_, item, blobs) if entry is not None and item not in entry.items:
            return StoredEntry(entry.head, [*entry.items, item], {**entry.blobs, **blobs})
        case Replace(_, head) if entry is not None and head is not None:
            return StoredEntry(head, entry.items, entry.blobs)
        case Delete():
            return None
    return entry
