"""The journal's file: entries with an append-only list of items, and blobs that entries share.

An entry has a kind and an id, an owner, a head that can be replaced, items, and the digests of its blobs
(media, pieces of conversations), each stored once. Everything is opaque bytes here. The kinds of entries, and
who deletes them beside the bounds of the file:

* `answer`, of `answers.record`: deleted when the answer is forgotten, or cannot be restored;
* `response`, of `api.responses.store`: responses and conversations, deleted by their owner;
* `served`, of `requests.recovery`: the served models, deleted when they have no worker.

Invariants:

* a group of operations is in the file whole or not at all, in order: the file always holds a prefix of them;
* what is read is what was written: heads and items have checksums, blobs are named by their digest. A file
  that is damaged is thrown away whole, with a warning; nothing of it is used;
* one process has the file, exclusively, and only its owner can read it;
* its size is bounded, and that of each kind with a quota: the oldest ended entry of the owner that has the
  most gives way, and then new entries are not written;
* an entry whose head has not changed for `AGE_S_MAX` is deleted, when the file is opened and with each group.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from sqlite3 import Cursor
from typing import Protocol

import msgspec

from broker.journal.database import DamagedError, Database

AGE_S_MAX = 30 * 86_400.0
"""Maximum age of an entry in seconds, since its head changed last; not of those of the kind `SERVED`."""
SERVED = "served"
"""Kind of the entries of served models: the `Ready` of the last worker of each, and nothing of requests."""
EXPIRED_MAX = 256
"""Maximum number of entries that are deleted for their age with one group."""
ENTRY_BYTES = 256
"""Overhead of an entry."""

Name = tuple[str, str]
"""Kind and id of an entry."""
Run = Callable[..., Cursor]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, id TEXT NOT NULL, head BLOB NOT NULL,
    ended INTEGER NOT NULL, at REAL NOT NULL, bytes INTEGER NOT NULL, UNIQUE (kind, id));
CREATE TABLE IF NOT EXISTS items (
    entry INTEGER NOT NULL, position INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (entry, position)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blobs (digest BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS uses (
    entry INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (entry, digest)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS uses_by_digest ON uses (digest);
CREATE INDEX IF NOT EXISTS entries_by_age ON entries (at);
"""
_SECOND_VERSION = """
BEGIN;
ALTER TABLE entries ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE entries SET owner = substr(id, 1, instr(id, ':') - 1), bytes = 256 + length(head);
CREATE INDEX entries_by_owner ON entries (kind, owner, bytes);
PRAGMA user_version = 2;
COMMIT;
"""
_group: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(list[bytes])
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Put:
    """Add an entry, or replace all of one. `ended`: it may give way to others."""

    name: Name
    head: bytes
    blobs: Mapping[bytes, bytes] = field(default_factory=dict)
    ended: bool = False
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Append:
    """Add an item, and its blobs, to an entry; without effect if there is no such entry."""

    name: Name
    item: bytes
    blobs: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace the head of an entry (None: keep it); without effect if there is no such entry. `ended`: as in
    `Put`."""

    name: Name
    head: bytes | None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove an entry; without effect if there is no such entry."""

    name: Name


Operation = Put | Append | Replace | Delete


class JournalQueue(Protocol):
    """The journal, for those who write."""

    def add(self, operation: Operation, nbytes: int = 0) -> int: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as it was read. `at`: time of the last change of its head, in seconds since 1970."""

    name: Name
    head: bytes
    items: list[bytes]
    ended: bool
    at: float


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry with the content of its blobs, by digest."""

    head: bytes
    items: list[bytes]
    blobs: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of all entries of a kind."""

    count_max: int
    bytes_max: int


class JournalFile:
    """The open file. For use by one thread at a time."""

    def __init__(
        self, path: Path | None, bytes_max: int, now: float, quotas: Mapping[str, Quota] | None = None
    ) -> None:
        """Open or create the file; None: one in memory. `quotas`: by kind. Raises `sqlite3.Error`, `OSError`,
        or `DamagedError`."""
        self.count = self.nbytes = 0
        """Entries, and bytes that the file takes for them, after the last group."""
        self.refused = 0
        """Number of entries that were not written for want of room."""
        self.overdue = False
        """Whether the last group may have left entries that are too old."""
        self._bytes_max = bytes_max
        self._quotas = quotas or {}
        self._base = Database(path, _SCHEMA)
        with ExitStack() as opened:
            opened.callback(self._base.close)
            self._prepare(now)
            opened.pop_all()

    def close(self) -> None:
        self._base.close()

    @property
    def is_there(self) -> bool:
        """Whether the file is still at its path: who deletes it wants its content gone."""
        return self._base.path is None or self._base.path.exists()

    def _prepare(self, now: float) -> None:
        run = self._base.run
        [version] = run("PRAGMA user_version").fetchone()
        if version < 2:
            self._base.run_script(_SECOND_VERSION)
        run("DELETE FROM entries WHERE at < ? AND kind != ?", (now - AGE_S_MAX, SERVED))
        for kind, quota in self._quotas.items():
            if not quota.count_max:
                run("DELETE FROM entries WHERE kind = ?", (kind,))
        self._sweep_orphans()
        [self.count] = run("SELECT count(*) FROM entries").fetchone()
        self.nbytes = self._base.nbytes

    def _sweep_orphans(self) -> None:
        run = self._base.run
        run("DELETE FROM items WHERE entry NOT IN (SELECT number FROM entries)")
        run("DELETE FROM uses WHERE entry NOT IN (SELECT number FROM entries)")
        run("DELETE FROM blobs WHERE digest NOT IN (SELECT digest FROM uses)")

    # --- reading ---

    def entries(self, kind: str) -> Iterator[Entry]:
        """Yield the entries of a kind, oldest first. Raises `DamagedError` or `sqlite3.Error`."""
        rows = self._base.run(
            "SELECT number, id, head, ended, at FROM entries WHERE kind = ? ORDER BY at, number", (kind,)
        ).fetchall()
        for number, id, head, ended, at in rows:
            items = self._items(self._base.run, number)
            yield Entry((kind, id), _opened(head), items, bool(ended), at)

    def _items(self, run: Run, number: int) -> list[bytes]:
        rows = run("SELECT position, data FROM items WHERE entry = ? ORDER BY position", (number,))
        items: list[bytes] = []
        for expected, (position, data) in enumerate(rows):
            if position != expected:
                raise DamagedError("items are missing")
            items += _group.decode(_opened(data))
        return items

    def blob(self, digest: bytes) -> bytes | None:
        """Return a blob; None if it is not there. Raises `DamagedError`."""
        row = self._base.run("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else _checked(digest, row[0])

    def read(self, name: Name) -> StoredEntry | None:
        """Return an entry; None if it is not there. May be called by another thread than the one that writes.

        Raises `DamagedError` or `sqlite3.Error`.
        """
        run = self._base.read
        is_file = self._base.path is not None
        if is_file:
            run("BEGIN")  # all of it as of one moment
        try:
            row = run("SELECT number, head FROM entries WHERE kind = ? AND id = ?", name).fetchone()
            if row is None:
                return None
            blobs = run("SELECT digest, data FROM uses JOIN blobs USING (digest) WHERE entry = ?", row[:1])
            found = {digest: _checked(digest, data) for digest, data in blobs}
            return StoredEntry(_opened(row[1]), self._items(run, row[0]), found)
        finally:
            if is_file:
                run("COMMIT")

    # --- writing ---

    def apply(self, operations: Sequence[Operation], now: float) -> None:
        """Write a group of operations, all or none of them, and delete what is too old.

        Raises `sqlite3.Error`; then close the file.
        """
        with self._base.transaction():
            self._expire(now)
            items: dict[Name, list[bytes]] = {}
            for operation in operations:
                match operation:
                    case Append(name, item, blobs):
                        items.setdefault(name, []).append(item)
                        self._add_blobs(name, blobs)
                    case Put(name):
                        items.pop(name, None)
                        self._put(operation, now)
                    case Replace(name, head, ended):
                        self._replace(name, head, now, ended=ended)
                    case Delete(name):
                        items.pop(name, None)
                        self._delete(name)
            for name, group in items.items():
                self._append(name, group)
        self.nbytes = self._base.nbytes

    def rename_owners(self, names: Mapping[str, str]) -> None:
        """Give what owners have to others; ids begin with the owner. Raises `sqlite3.Error`."""
        for (owner,) in self._base.run("SELECT DISTINCT owner FROM entries WHERE owner != ''").fetchall():
            self._base.run(
                "UPDATE entries SET owner = ?1, id = ?1 || substr(id, length(owner) + 1) WHERE owner = ?2",
                (names.get(owner, owner), owner),
            )

    def tidy(self) -> None:
        """Give the log and all free pages back to the file system. Raises `sqlite3.Error`."""
        self._base.tidy()

    def _number(self, name: Name) -> int | None:
        row = self._base.run("SELECT number FROM entries WHERE kind = ? AND id = ?", name).fetchone()
        return None if row is None else int(row[0])

    def _expire(self, now: float) -> None:
        """Delete the oldest entries that are too old."""
        statement = "SELECT kind, id FROM entries WHERE at < ? AND kind != ? ORDER BY at LIMIT ?"
        expired = self._base.run(statement, (now - AGE_S_MAX, SERVED, EXPIRED_MAX)).fetchall()
        for name in expired:
            self._delete(name)
        self.overdue = len(expired) == EXPIRED_MAX

    def _put(self, put: Put, now: float) -> None:
        unused = self._take(put.name)
        self._base.run(
            "INSERT INTO entries (kind, id, head, ended, at, bytes, owner) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*put.name, _sealed(put.head), put.ended, now, ENTRY_BYTES + len(put.head), put.owner),
        )
        self.count += 1
        self._add_blobs(put.name, put.blobs)
        self._drop_blobs(unused)
        self._make_room(put.name)

    def _add_blobs(self, name: Name, blobs: Mapping[bytes, bytes]) -> None:
        """Store what an entry uses, if it is not there yet; without effect if there is no such entry."""
        if not blobs or (number := self._number(name)) is None:
            return
        run, added = self._base.run, 0
        for digest, data in blobs.items():
            run("INSERT OR IGNORE INTO uses (entry, digest) VALUES (?, ?)", (number, digest))
            is_new = run("INSERT OR IGNORE INTO blobs (digest, data) VALUES (?, ?)", (digest, data)).rowcount
            added += len(data) if is_new else 0
        run("UPDATE entries SET bytes = bytes + ? WHERE number = ?", (added, number))

    def _replace(self, name: Name, head: bytes | None, now: float, *, ended: bool) -> None:
        sealed = None if head is None else _sealed(head)
        self._base.run(
            "UPDATE entries SET head = coalesce(?, head), ended = ?, at = ? WHERE kind = ? AND id = ?",
            (sealed, ended, now, *name),
        )

    def _append(self, name: Name, group: list[bytes]) -> None:
        if (number := self._number(name)) is not None:
            self._base.run(
                "INSERT INTO items SELECT ?1, coalesce(max(position) + 1, 0), ?2 FROM items WHERE entry = ?1",
                (number, _sealed(_encoder.encode(group))),
            )
            self._make_room(name)

    def _delete(self, name: Name) -> None:
        self._drop_blobs(self._take(name))

    def _take(self, name: Name) -> list[tuple[bytes]]:
        """Remove an entry, and return the digests of the blobs that it used."""
        if (number := self._number(name)) is None:
            return []
        run = self._base.run
        digests: list[tuple[bytes]] = run("SELECT digest FROM uses WHERE entry = ?", (number,)).fetchall()
        for table, column in (("entries", "number"), ("items", "entry"), ("uses", "entry")):
            run(f"DELETE FROM {table} WHERE {column} = ?", (number,))
        self.count -= 1
        return digests

    def _drop_blobs(self, digests: Sequence[tuple[bytes]]) -> None:
        """Remove the blobs that no entry uses any more."""
        unused = "digest = ?1 AND NOT EXISTS (SELECT 1 FROM uses WHERE digest = ?1)"
        for digest in digests:
            self._base.run(f"DELETE FROM blobs WHERE {unused}", digest)

    def _make_room(self, name: Name) -> None:
        """Delete ended entries until all bounds hold; if there are none left, the new one is not kept."""
        while (excess := self._excess(name[0])) is not None:
            chosen, measure = excess
            row = self._base.run(
                f"SELECT kind, id FROM entries WHERE {chosen} AND owner ="
                f" (SELECT owner FROM entries WHERE {chosen} GROUP BY owner ORDER BY {measure} DESC LIMIT 1)"
                " ORDER BY at, number LIMIT 1",
                {"kind": name[0]},
            ).fetchone()
            if row is None or (row[0], row[1]) == name:
                self.refused += 1
                self._delete(name)
                return
            self._delete((row[0], row[1]))

    def _excess(self, kind: str) -> tuple[str, str] | None:
        """Return which entries take too much, and by which measure; None if all bounds hold."""
        if self._base.nbytes > self._bytes_max:
            return "ended", "sum(bytes)"
        if (quota := self._quotas.get(kind)) is None:
            return None
        statement = "SELECT count(*), coalesce(sum(bytes), 0) FROM entries WHERE kind = ?"
        count, nbytes = self._base.run(statement, (kind,)).fetchone()
        if count > quota.count_max:
            return "kind = :kind", "count(*)"
        return ("kind = :kind", "sum(bytes)") if nbytes > quota.bytes_max else None


def _checked(digest: bytes, data: bytes) -> bytes:
    if sha256(data).digest() != digest:
        raise DamagedError("a blob has another digest")
    return bytes(data)


def _sealed(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little") + data


def _opened(sealed: bytes) -> bytes:
    data = bytes(sealed[4:])
    if zlib.crc32(data).to_bytes(4, "little") != sealed[:4]:
        raise DamagedError("a checksum is wrong")
    return data
