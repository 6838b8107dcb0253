"""A SQLite file of one process: what a transaction has written survives every crash whole, or not at all.

SQLite's log is synced to the disk after each transaction. A lock beside the file keeps other processes out,
and lets other connections of this process read while one writes. Only its owner can read the file. A file
that is shorter than it says, or inconsistent, is noticed when it is opened.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from protocol.common.secure_files import database_files, is_private

BUSY_S_MAX = 1.0
"""Longest wait for a lock of another connection on the file."""
CHECKED_BYTES_MAX = 64 * 2**20
"""A file up to this size is checked as a whole when it is opened."""
PAGE_BYTES = 4096
FREE_PAGES_MAX = 256
"""Maximum of free pages that are kept for later, and size of the log that is kept."""
VACUUM_PAGES_MAX = 2048
"""Maximum of pages that are given back after one transaction."""


class DamagedError(Exception):
    """The file holds something that was not written to it."""


class Database:
    """The open file. For use by one thread at a time, and by another one that reads."""

    def __init__(self, path: Path | None, schema: str) -> None:
        """Open or create the file; None: a database in memory. Raises `sqlite3.Error`, `OSError`
        (`BlockingIOError`: another process has it), or `DamagedError`."""
        self.path = path
        with ExitStack() as opened:
            if path is not None:
                _create(path)
                opened.enter_context(locked(path.with_name(f"{path.name}-lock")))
            self._base = opened.enter_context(closing(_connect(path or ":memory:")))
            self.run = self._base.execute
            self.run_script = self._base.executescript
            self._prepare()
            if path is not None:
                self._check(path)
            self.run_script(schema)
            self.read = self.run
            """As `run`, for statements that only read, on another thread while this one writes."""
            if path is not None:
                self.read = opened.enter_context(closing(_connect(path))).execute
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def _prepare(self) -> None:
        self.run(f"PRAGMA page_size = {PAGE_BYTES}")
        self.run("PRAGMA auto_vacuum = INCREMENTAL")
        self.run("PRAGMA journal_mode = WAL")
        self.run(f"PRAGMA journal_size_limit = {FREE_PAGES_MAX * PAGE_BYTES}")
        self.run("PRAGMA synchronous = FULL")
        self.run("PRAGMA secure_delete = ON")
        self.run("BEGIN IMMEDIATE")  # fails if an earlier version of the gateway has the file
        self.run("COMMIT")

    def _check(self, path: Path) -> None:
        """Raise `DamagedError` if the file is shorter than it says, or inconsistent."""
        self.run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        [pages] = self.run("PRAGMA page_count").fetchone()
        size = path.stat().st_size
        if size < pages * PAGE_BYTES:
            raise DamagedError(f"{size} bytes instead of {pages * PAGE_BYTES}")
        if size <= CHECKED_BYTES_MAX:
            # A quick check does not compare indices with their tables.
            [verdict] = self.run("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise DamagedError(str(verdict))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all that the block runs, or none of it. Raises `sqlite3.Error`."""
        self.run("BEGIN IMMEDIATE")
        with self._base:  # commits, or rolls back
            yield
        with suppress(sqlite3.Error):  # what was written is there all the same
            [free] = self.run("PRAGMA freelist_count").fetchone()
            if free > FREE_PAGES_MAX:
                self.run_script(f"PRAGMA incremental_vacuum({VACUUM_PAGES_MAX})")

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use."""
        [pages] = self.run("PRAGMA page_count").fetchone()
        [free] = self.run("PRAGMA freelist_count").fetchone()
        return int(pages - free) * PAGE_BYTES

    def tidy(self) -> None:
        """Give the log and all free pages back to the file system. Raises `sqlite3.Error`."""
        # `execute` would stop after one page: the statement has rows without columns.
        self.run_script("PRAGMA incremental_vacuum")
        self.run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _connect(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_S_MAX, isolation_level=None, check_same_thread=False)


def is_damage(error: Exception) -> bool:
    """Return whether the file holds something that was not written to it."""
    is_of_database = isinstance(error, sqlite3.DatabaseError)
    return isinstance(error, DamagedError) or (
        is_of_database and not isinstance(error, sqlite3.OperationalError)
    )


def remove(path: Path) -> int:
    """Delete the file and what SQLite keeps beside it. Return the number of bytes. Raises `OSError`."""
    total = 0
    for part in database_files(path):
        total += part.stat().st_size
        part.unlink()
    return total


def _create(path: Path) -> None:
    """Create folder and file for their owner only; SQLite gives its other files the mode of the first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(path.parent):
        raise PermissionError(f"{path.parent} must be a folder owned by you with mode 0700")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file. Raises `BlockingIOError` if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{path.parent} is locked by another process") from None
        yield
    finally:
        os.close(descriptor)
