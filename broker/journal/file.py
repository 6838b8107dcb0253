"""The journal's file: entries with an append-only list of items, and blobs that entries share.

An entry has a kind and an id, a head that can be replaced, items, and the digests of its blobs (media, pieces
of conversations), each stored once. Everything is opaque bytes here. Invariants:

* a group of operations is in the file whole or not at all, in order: the file always holds a prefix of them;
* what is read is what was written: heads and items have checksums, blobs are named by their digest. A file
  that is damaged is thrown away whole, with a warning; nothing of it is used;
* one process has the file, exclusively, and only its owner can read it;
* its size is bounded: the oldest ended entries give way, and then new entries are not written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec

from broker.journal.database import DamagedError, Database

AGE_S_MAX = 30 * 86_400.0
"""Maximum age of an entry in seconds, since its last change."""
ENTRY_BYTES = 256
"""Overhead of an entry."""

Name = tuple[str, str]
"""Kind and id of an entry."""

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
PRAGMA user_version = 1;
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


@dataclass(frozen=True, slots=True)
class Append:
    """Add an item to an entry; without effect if there is no such entry."""

    name: Name
    item: bytes


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


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as it was read. `at`: time of the last change of its head, in seconds since 1970."""

    name: Name
    head: bytes
    items: list[bytes]
    ended: bool
    at: float


@dataclass(slots=True)
class _EntryState:
    number: int
    position: int
    nbytes: int


class JournalFile:
    """The open file. For use by one thread at a time."""

    def __init__(self, path: Path, bytes_max: int, now: float) -> None:
        """Open or create the file. Raises `sqlite3.Error`, `OSError`, or `DamagedError`."""
        self.nbytes = 0
        self.refused = 0
        """Number of entries that were not written for want of room."""
        self._bytes_max = bytes_max
        self._known: dict[Name, _EntryState] = {}
        self._base = Database(path, bytes_max, _SCHEMA)
        with ExitStack() as opened:
            opened.callback(self._base.close)
            self._prepare(now)
            opened.pop_all()

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        self._base.close()

    @property
    def is_there(self) -> bool:
        """Whether the file is still at its path: who deletes it wants its content gone."""
        return self._base.path.exists()

    def _prepare(self, now: float) -> None:
        run = self._base.run
        run("DELETE FROM entries WHERE at < ?", (now - AGE_S_MAX,))
        self._sweep_orphans()
        rows = run(
            "SELECT number, kind, id, bytes + coalesce(sum(length(data)), 0), count(data)"
            " FROM entries LEFT JOIN items ON entry = number GROUP BY number"
        )
        for number, kind, id, nbytes, position in rows:
            self._known[kind, id] = _EntryState(number, position, nbytes)
            self.nbytes += nbytes

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
            yield Entry((kind, id), _opened(head), self._items(number), bool(ended), at)

    def _items(self, number: int) -> list[bytes]:
        rows = self._base.run("SELECT position, data FROM items WHERE entry = ? ORDER BY position", (number,))
        items: list[bytes] = []
        for expected, (position, data) in enumerate(rows):
            if position != expected:
                raise DamagedError("items are missing")
            items += _group.decode(_opened(data))
        return items

    def blob(self, digest: bytes) -> bytes | None:
        """Return a blob; None if it is not there. Raises `DamagedError`."""
        row = self._base.run("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return None
        data = bytes(row[0])
        if sha256(data).digest() != digest:
            raise DamagedError("a blob has another digest")
        return data

    # --- writing ---

    def apply(self, operations: Sequence[Operation], now: float) -> None:
        """Write a group of operations, all or none of them. Raises `sqlite3.Error`; then close the file."""
        with self._base.transaction():
            items: dict[Name, list[bytes]] = {}
            for operation in operations:
                match operation:
                    case Append(name, item):
                        items.setdefault(name, []).append(item)
                    case Put(name):
                        items.pop(name, None)
                        self._delete(name)
                        self._put(operation, now)
                    case Replace(name, head, ended):
                        self._replace(name, head, now, ended=ended)
                    case Delete(name):
                        items.pop(name, None)
                        self._delete(name)
            for name, group in items.items():
                self._append(name, group)

    def tidy(self) -> None:
        """Give the log and all free pages back to the file system. Raises `sqlite3.Error`."""
        self._base.tidy()

    def _put(self, put: Put, now: float) -> None:
        run = self._base.run
        size = ENTRY_BYTES + len(put.head) + sum(map(len, put.blobs.values()))
        if not self._make_room(size):
            self.refused += 1
            return
        cursor = run(
            "INSERT INTO entries (kind, id, head, ended, at, bytes) VALUES (?, ?, ?, ?, ?, ?)",
            (*put.name, _sealed(put.head), put.ended, now, size),
        )
        number = cursor.lastrowid or 0
        self._known[put.name] = _EntryState(number, 0, size)
        self.nbytes += size
        for digest, data in put.blobs.items():
            run("INSERT OR IGNORE INTO uses (entry, digest) VALUES (?, ?)", (number, digest))
            run("INSERT OR IGNORE INTO blobs (digest, data) VALUES (?, ?)", (digest, data))

    def _replace(self, name: Name, head: bytes | None, now: float, *, ended: bool) -> None:
        if (known := self._known.get(name)) is not None:
            sealed = None if head is None else _sealed(head)
            self._base.run(
                "UPDATE entries SET head = coalesce(?, head), ended = ?, at = ? WHERE number = ?",
                (sealed, ended, now, known.number),
            )

    def _append(self, name: Name, group: list[bytes]) -> None:
        known = self._known.get(name)
        if known is None:
            return
        data = _sealed(_encoder.encode(group))
        self._base.run("INSERT INTO items VALUES (?, ?, ?)", (known.number, known.position, data))
        known.position += 1
        known.nbytes += len(data)
        self.nbytes += len(data)

    def _delete(self, name: Name) -> None:
        known = self._known.pop(name, None)
        if known is None:
            return
        run, number = self._base.run, (known.number,)
        digests = run("SELECT digest FROM uses WHERE entry = ?", number).fetchall()
        for table, column in (("entries", "number"), ("items", "entry"), ("uses", "entry")):
            run(f"DELETE FROM {table} WHERE {column} = ?", number)
        for digest in digests:
            run(
                "DELETE FROM blobs WHERE digest = ? AND NOT EXISTS (SELECT 1 FROM uses WHERE digest = ?)",
                (*digest, *digest),
            )
        self.nbytes -= known.nbytes

    def _make_room(self, size: int) -> bool:
        """Delete the oldest ended entries until `size` bytes fit. Return False if they do not."""
        while self.nbytes + size > self._bytes_max:
            row = self._base.run(
                "SELECT kind, id FROM entries WHERE ended ORDER BY at, number LIMIT 1"
            ).fetchone()
            if row is None:
                return False
            self._delete((row[0], row[1]))
        return True


def _sealed(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little") + data


def _opened(sealed: bytes) -> bytes:
    data = bytes(sealed[4:])
    if zlib.crc32(data).to_bytes(4, "little") != sealed[:4]:
        raise DamagedError("a checksum is wrong")
    return data
