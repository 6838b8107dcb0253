"""The journal: what is written in groups, and what happens when the disk does not take it."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from broker.journal import database
from broker.journal import journal as module
from broker.journal.file import (
    AGE_S_MAX,
    Append,
    Delete,
    JournalFile,
    Operation,
    Put,
    Quota,
    Replace,
    StoredEntry,
)
from broker.journal.journal import Journal

WAIT_S = 20.0
NAME, OTHER = ("answer", "a"), ("answer", "b")


class Watched:
    """A journal whose commits can be waited for."""

    def __init__(
        self,
        path: Path,
        quotas: dict[str, Quota] | None = None,
        *,
        in_memory: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.journal = Journal(None if in_memory else path, 2**20, quotas, clock=clock, retry_s=0.01)
        self._step = threading.Condition()
        self._steps = 0

    def start(self) -> None:
        self.journal.start(self._stepped)

    def _stepped(self) -> None:
        with self._step:
            self._steps += 1
            self._step.notify_all()

    def written(self, *operations: Operation) -> None:
        """Add operations, and wait until the thread is done with them."""
        number = [self.journal.add(operation) for operation in operations][-1]
        with self._step:
            done = self._step.wait_for(
                lambda: not number or self.journal.committed >= number or self.journal.status().problem,
                WAIT_S,
            )
        assert done

    def recovered(self) -> None:
        """Wait until the disk works again."""
        self.until(lambda: not self.journal.status().problem)

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until the thread has done something."""
        with self._step:
            assert self._step.wait_for(happened, WAIT_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "journal.sqlite"


def heads(path: Path) -> dict[str, bytes]:
    journal = Journal(path, 2**20)
    try:
        return {entry.name[1]: entry.head for entry in journal.entries("answer")}
    finally:
        journal.close()


def test_what_was_committed_is_there_for_the_next_gateway(path: Path) -> None:
    watched = Watched(path)
    watched.start()
    watched.written(Put(NAME, b"head"), Append(NAME, b"1"), Append(NAME, b"2"), Replace(NAME, b"later"))
    watched.written(Put(("answer", "c"), b""), *(Append(("answer", "c"), b"x") for _ in range(1000)))
    watched.written(Delete(("answer", "c")))
    status = watched.journal.status()
    assert status.operations == 1006
    assert status.commits < 100, "operations of a moment are written together"
    watched.journal.add(Put(OTHER, b"written when it is closed"))
    watched.journal.close()
    journal = Journal(path, 2**20)
    first, second = journal.entries("answer")
    assert (first.head, first.items, second.head) == (b"later", [b"1", b"2"], b"written when it is closed")
    journal.close()


@pytest.mark.parametrize(
    "error", [sqlite3.OperationalError("disk is full"), OSError(5, "I/O error")], ids=str
)
def test_a_disk_that_fails_costs_no_answer_and_is_tried_again(
    error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched(path)
    watched.start()
    watched.written(Put(NAME, b"before"), Append(NAME, b"1"))

    def fail(self: JournalFile, operations: object, now: float) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(JournalFile, "apply", fail)
        watched.written(Append(NAME, b"2"))
        assert watched.journal.add(Put(OTHER, b"meanwhile")) == 0
        status = watched.journal.status()
        assert (status.lost, status.queued) == (2, 0)
        assert str(error) in status.problem
    watched.journal.wake()
    watched.recovered()
    watched.written(Put(("answer", "c"), b"after"), Append(NAME, b"3"))
    watched.journal.close()
    assert heads(path) == {"c": b"after"}  # never an answer with a gap
    told = [record.message for record in caplog.records if "journal" in record.message]
    assert len(told) == 2
    assert "cannot be written" in told[0]
    assert "works again" in told[1]


def test_beyond_the_bound_of_the_queue_an_answer_is_lost_whole_and_nobody_waits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES_MAX", 2000)
    watched = Watched(path)
    numbers = [watched.journal.add(Put(NAME, b"first"), 5)]
    numbers += [watched.journal.add(Append(NAME, b"x" * 1000), 1000) for _ in range(4)]
    assert numbers == [1, 2, 0, 0, 0]
    assert watched.journal.status().lost == 1
    watched.start()
    watched.written(Delete(OTHER))
    watched.written(Put(OTHER, b"second"))
    watched.journal.close()
    assert heads(path) == {"b": b"second"}


def test_a_damaged_or_deleted_file_starts_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"not a database " * 1000)
    watched = Watched(path)
    assert watched.journal.entries("answer") == []
    watched.start()
    watched.written(Put(NAME, b"head"))
    assert watched.journal.status().started_over == 1
    assert "starts over" in caplog.text
    database.remove(path)
    watched.written(Put(OTHER, b"later"))
    watched.journal.close()
    assert heads(path) == {"b": b"later"}


@pytest.mark.parametrize("how", ["locked", "a file in the way"])
def test_a_journal_that_cannot_be_opened_is_none(
    how: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S_MAX", 0.0)
    other: JournalFile | None = None
    if how == "locked":
        other = JournalFile(path, 2**20, 0.0)
    else:
        path.parent.write_bytes(b"")
    watched = Watched(path)
    assert watched.journal.entries("answer") == []
    watched.start()
    assert watched.journal.add(Put(NAME, b"head")) == 0
    assert watched.journal.status().problem
    if other is not None:
        other.close()
        watched.journal.wake()
        watched.recovered()
    watched.journal.close()


def test_of_entries_that_can_be_read_the_oldest_are_lost_at_the_bound(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES_MAX", 2500)
    path.parent.write_bytes(b"")  # a file in the way
    journal = Watched(path, quotas={"response": Quota(100, 2500)}).journal
    for number in range(20):
        journal.add(Put(("response", f"ann:{number}"), b"%d" % number), 872)
        assert journal.read(("response", f"ann:{number}")) == StoredEntry(b"%d" % number, [], {})
    with pytest.raises(OSError, match="journal"):
        journal.read(("response", "ann:0"))
    status = journal.status()
    assert (status.queued + status.lost, journal._queued_bytes) == (20, 1000 * status.queued)
    journal.close()


STORED = {"response": Quota(2, 2**20)}
FIRST = ("response", "ann:1")


def digests(*blobs: bytes) -> dict[bytes, bytes]:
    return {sha256(blob).digest(): blob for blob in blobs}


@pytest.mark.parametrize("where", ["file", "memory"])
def test_an_entry_is_read_by_its_name_whether_it_is_written_or_queued(where: str, path: Path) -> None:
    watched = Watched(path, quotas=STORED, in_memory=where == "memory")
    journal = watched.journal

    def check() -> None:
        assert journal.read(FIRST) == StoredEntry(b"head", [b"1"], digests(b"x", b"y"))
        assert journal.read(("response", "bob:1")) is None

    journal.add(Put(FIRST, b"head", digests(b"x"), ended=True))
    journal.add(Append(FIRST, b"1", digests(b"y")))
    check()
    watched.start()
    watched.written(Replace(FIRST, b"head"))
    check()
    watched.written(Append(FIRST, b"2"))
    assert journal.read(FIRST) == StoredEntry(b"head", [b"1", b"2"], digests(b"x", b"y"))
    journal.add(Delete(FIRST))
    assert journal.read(FIRST) is None
    journal.close()


def test_entries_of_a_disk_that_fails_are_read_as_far_as_they_are_queued(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(path, quotas=STORED)
    watched.start()
    watched.written(Put(FIRST, b"head"))

    def fail(self: JournalFile, operations: object, now: float) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(JournalFile, "apply", fail)
    watched.written(Put(("response", "ann:2"), b"later"))
    assert watched.journal.read(("response", "ann:2")) == StoredEntry(b"later", [], {})
    with pytest.raises(OSError, match="I/O"):
        watched.journal.read(FIRST)
    monkeypatch.undo()
    watched.journal.wake()
    watched.recovered()
    watched.journal._file._base.run("UPDATE entries SET head = X'01'")  # type: ignore[union-attr]
    with pytest.raises(OSError, match="checksum"):
        watched.journal.read(FIRST)
    watched.written(Put(FIRST, b"again"))
    assert watched.journal.read(FIRST) == StoredEntry(b"again", [], {})
    assert watched.journal.status().started_over == 1, "a file that is damaged is thrown away whole"
    watched.journal.close()


def test_an_idle_journal_gives_its_space_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    tidied = threading.Event()
    tidy = JournalFile.tidy

    def tidy_and_tell(file: JournalFile) -> None:
        tidy(file)
        tidied.set()

    monkeypatch.setattr(JournalFile, "tidy", tidy_and_tell)
    watched = Watched(path)
    watched.start()
    watched.written(Put(NAME, b"x" * 500_000))
    watched.written(Delete(NAME))
    assert tidied.wait(WAIT_S)
    watched.journal.close()
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_idle_journal_deletes_what_is_too_old(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, in_memory: bool
) -> None:
    monkeypatch.setattr(module, "EXPIRE_S", 0.01)
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    now = [1e9]
    watched = Watched(path, {OTHER[0]: Quota(9, 2**20)}, in_memory=in_memory, clock=lambda: now[0])
    watched.start()
    watched.written(Put(NAME, b"old"))
    now[0] += AGE_S_MAX - 1.0
    watched.written(Put(OTHER, b"new"))
    now[0] += 2.0
    watched.until(lambda: watched.journal.status().entries == 1)
    assert watched.journal.read(NAME) is None
    assert watched.journal.read(OTHER) is not None
    watched.journal.close()
