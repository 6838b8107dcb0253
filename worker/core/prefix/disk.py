"""Disk tier of the prefix cache: a thread that writes, reads and removes stored items.

The index decides what is stored and for how long. The thread owns the folder and serves two queues: reads and
removals, in order of arrival, take precedence over writes. Disk errors never fail a request: what cannot be
written is not stored, and what cannot be read is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.core.prefix.folder import DIGEST, FileWriter, Folder, Record, StoredItem, WriteLedger, prepare
from worker.core.prefix.write_budget import WriteBudget

log = logging.getLogger(__name__)

QUEUE_BYTES_MAX = 256 * 2**20
"""Bytes that wait to be written: half a second of an SSD at 500 MB/s; more is not stored on disk."""
FAILURES_MAX = 3
"""Number of consecutive failed writes that pause writing for `PAUSE_S`; each further one pauses it again."""
PAUSE_S = 60.0
CLOSE_WAIT_S_MAX = 10.0
"""Seconds for which a worker that ends waits for the queue."""
SPACE_EVERY_S = 60.0
"""Interval at which an idle tier looks how much space others have left."""

OnWritten = Callable[[str, int | None], None]
"""Takes a digest and the size of its file in bytes; None: the write failed."""
OnRead = Callable[[dict[str, Record | None]], None]


@dataclass(frozen=True, slots=True)
class _Write:
    draft: FileWriter
    done: OnWritten


@dataclass(frozen=True, slots=True)
class _Read:
    digests: Sequence[str]
    buffer: memoryview | None
    done: OnRead


@dataclass(frozen=True, slots=True)
class _Remove:
    digests: Sequence[str]
    withdrawn: Sequence[_Write]
    """Queued writes of the same digests."""


class DiskTier:
    """Stored items of one model in `folder`, which is created, used by this model only, and private.

    `fingerprint`: of the weights and their quantization; files with another one are removed. Digests are 8 to
    128 lower-case hex digits. Every `done` is called once, on the tier's thread, and must not raise. After
    `close` every read is a miss, reported on the caller's thread.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        ledger: WriteLedger,
        *,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
        on_space: Callable[[], None] | None = None,
        space_every_s: float = SPACE_EVERY_S,
    ) -> None:
        """`ledger`: of the writes, used by the tier's thread from now on. `on_space`: called on the tier's
        thread when it has looked at the space while idle."""
        self._folder, self._fingerprint = Folder(folder, fingerprint), fingerprint
        self._queue_bytes_max, self._clock = queue_bytes_max, clock
        self._failures, self._paused_until = 0, float("-inf")
        self._on_space, self._space_every_s = on_space, space_every_s
        self.room = self._folder.room()
        """Free bytes of the disk and those of its own files, after the last write or look; None: unknown."""
        self._ledger = ledger
        self.written = 0
        """Bytes written to files."""
        self._changed = threading.Condition()  # guards what follows
        self._urgent: deque[_Read | _Remove] = deque()
        self._writes: deque[_Write] = deque()
        self._queue_bytes = 0
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    @property
    def usage(self) -> int:
        """Total bytes of the files found or written here and not removed since."""
        return self._folder.usage

    @property
    def budget(self) -> WriteBudget:
        """The write budget, before anything is written."""
        return self._ledger.full

    @property
    def writes_left(self) -> int:
        """Bytes of the write budget that are neither spent nor queued."""
        return max(0, self._ledger.left - self._queue_bytes)

    @property
    def name(self) -> str:
        """Identity of the folder, equal for all processes that use it under any path."""
        return self._folder.name

    def scan(self) -> list[StoredItem]:
        """List the stored items from their headers. Runs on the caller's thread, before the first job."""
        return list(self._folder.scan())

    def write(self, record: Record, done: OnWritten) -> bool:
        """Queue an item; its arrays must not change before `done`.

        False: not queued, because the queue is full, writing is paused, the write budget is used up, or a
        file cannot hold the item.
        """
        assert DIGEST.fullmatch(record.digest), record.digest
        try:
            draft = prepare(record, self._fingerprint)
        except ValueError as error:
            log.warning("prefix %s cannot be stored: %s", record.digest, error)
            return False
        with self._changed:
            full = draft.file_bytes > min(self._queue_bytes_max - self._queue_bytes, self.writes_left)
            if full or self._closed or self._is_paused():
                return False
            self._queue_bytes += draft.file_bytes
            self._writes.append(_Write(draft, done))
            self._changed.notify_all()
        return True

    def read(self, digests: Iterable[str], done: OnRead, buffer: memoryview | None = None) -> None:
        """Queue a read. `done` gets None for each item that is missing, or damaged and therefore removed.

        `buffer`: memory for the only item, if it is large enough; not to be touched before `done`.
        """
        job = _Read(_checked(digests), buffer, done)
        assert buffer is None or len(job.digests) == 1
        with self._changed:
            if not self._closed:
                self._urgent.append(job)
                self._changed.notify_all()
                return
        _miss(job)

    def remove(self, digests: Iterable[str]) -> None:
        """Queue a removal. Queued writes of the same digests are dropped, which their `done` reports."""
        wanted = _checked(digests)
        among = set(wanted)
        with self._changed:
            if self._closed or not wanted:
                return
            withdrawn = [write for write in self._writes if write.draft.digest in among]
            self._writes = deque(write for write in self._writes if write.draft.digest not in among)
            self._urgent.append(_Remove(wanted, withdrawn))
            self._changed.notify_all()

    def flush(self, wait_s_max: float = CLOSE_WAIT_S_MAX) -> bool:
        """Wait until nothing is queued or running. False: timeout."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, wait_s_max)

    def close(self, wait: bool) -> None:
        """End the thread. `wait`: finish queued jobs first, for at most `CLOSE_WAIT_S_MAX`. Removals are
        always made; other remaining jobs are dropped, which their `done` reports."""
        if wait:
            self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if wait:
            self._thread.join(CLOSE_WAIT_S_MAX)

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._work():
                pass
        finally:
            self._drop_rest()

    def _work(self) -> bool:
        """Run one job, without keeping a reference to it. False: the tier is closed."""
        with self._changed:
            has_news = self._changed.wait_for(self._has_news, self._space_every_s)
            if self._closed:
                return False
            if has_news:
                job = self._urgent.popleft() if self._urgent else self._writes.popleft()
                self._busy = True
        if not has_news:
            self._look()
            return True
        try:
            self._do(job)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        return True

    def _look(self) -> None:
        """Look at the space, outside of the lock: a file system may take its time."""
        self.room = self._folder.room()
        self._ledger.look()
        if self._on_space is not None:
            self._on_space()

    def _do(self, job: _Write | _Read | _Remove) -> None:
        match job:
            case _Write():
                written = self._save(job.draft)
                self.room = self._folder.room()
                self._end(job, written)
            case _Read():
                job.done({digest: self._folder.read(digest, job.buffer) for digest in job.digests})
            case _Remove():
                for digest in job.digests:
                    self._folder.remove(digest)
                for write in job.withdrawn:
                    self._end(write, None)

    def _save(self, draft: FileWriter) -> int | None:
        if self._is_paused():
            return None
        if self._folder.has(draft):
            return draft.file_bytes
        try:
            if not self._ledger.spend(draft.file_bytes):
                return None
            self._folder.save(draft)
        except OSError as error:
            self._failures += 1
            if self._failures == 1:
                log.warning("prefixes cannot be stored: %s", error)
            if self._failures >= FAILURES_MAX:
                self._paused_until = self._clock() + PAUSE_S
            return None
        if self._failures:
            log.info("prefixes can be stored again")
        self._failures = 0
        self.written += draft.file_bytes
        return draft.file_bytes

    def _end(self, job: _Write, written: int | None) -> None:
        with self._changed:
            self._queue_bytes -= job.draft.file_bytes
        job.done(job.draft.digest, written)

    def _drop_rest(self) -> None:
        with self._changed:
            self._closed = True  # even if a `done` raised: callers must not wait for a dead thread
            urgent, writes = list(self._urgent), list(self._writes)
            self._urgent.clear()
            self._writes.clear()
        for job in urgent:
            if isinstance(job, _Read):
                _miss(job)
            else:
                self._do(job)
        for write in writes:
            self._end(write, None)

    def _has_news(self) -> bool:
        return bool(self._closed or self._urgent or self._writes)

    def _is_idle(self) -> bool:
        return not (self._busy or self._urgent or self._writes)

    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until


def _checked(digests: Iterable[str]) -> Sequence[str]:
    checked = tuple(digests)
    assert all(DIGEST.fullmatch(digest) for digest in checked), checked
    return checked


def _miss(job: _Read) -> None:
    job.done(dict.fromkeys(job.digests))
