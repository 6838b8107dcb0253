"""What has been computed is kept, and need not be computed again. On the model thread.

The index knows what is stored of which prefix, the engine cuts it out of rows and makes rows of it, the disk
tier writes and reads on a thread of its own and answers through the loop's inbox. Nothing here can fail a
request: what cannot be stored or restored is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from protocol.about import about
from protocol.parts import PrefixStatus
from worker.contract import Cut, Engine, Model, Piece
from worker.prefixes.disk import DiskTier
from worker.prefixes.files import Record
from worker.prefixes.index import Item, Match, PrefixIndex
from worker.schedule.commands import Command, Fetched, Written
from worker.schedule.keeping import keep
from worker.schedule.recall import SAMPLED_TOKENS, Recall, open_recall
from worker.schedule.rows import Phase, Row

log = logging.getLogger(__name__)

BLOCK_TOKENS = 512
"""The most of one stored run, which is forgotten as a whole."""
KEPT_TOKENS_MIN = 256
"""A prefill is stored whenever it has got on so far."""
DISK_TOKENS_MIN = 512
"""What is shorter is computed again sooner than it is worth files, and their writing."""
ENDED_TOKENS_MIN = 64
"""What a cancelled prefill must have got on for it to be worth storing."""


_RAM_DEFAULT = 2**30


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be stored: bytes in memory (None: a quarter of what is left for caches) and on the disk,
    in `folder`."""

    ram: int | None
    disk: int
    folder: Path


@dataclass(slots=True)
class Store:
    """Stored prefixes of one model. `post` puts a command into the loop's inbox, from any thread.

    `ram_max`: bytes in memory. `disk`: None where nothing is written; then `disk_max` means nothing.
    """

    engine: Engine
    index: PrefixIndex
    ram_max: int
    post: Callable[[Command], None]
    disk: DiskTier | None = None
    disk_max: int = 0
    recall: Recall | None = None
    """What the draft model has read, in the same memory."""
    _writing: dict[str, Item] = field(default_factory=dict)
    _reading: dict[str, Item] = field(default_factory=dict)
    _awaited: dict[str, set[str]] = field(default_factory=dict)
    """For each held row, the digests it waits for."""

    # --- from the disk ---

    def open(self) -> None:
        """Take note of what is on the disk. Orphans, whose beginnings are gone, are removed."""
        if self.disk is None:
            return
        began = time.monotonic()
        found = self.disk.scan()
        self.disk.remove(self.index.restore_from_disk(found))
        self._fit_disk()
        if found:
            took = time.monotonic() - began
            log.info(
                "%d stored prefixes found on disk, %d bytes, in %.1f s",
                len(found),
                self.index.disk_bytes,
                took,
            )

    def fetch(self, row: Row) -> None:
        """Hold a row whose prompt begins with something that is on the disk only, and read that."""
        if self.disk is None or row.sparse:
            return
        match = self.index.find(row.tokens, salt=row.request.salt, limit=row.reusable)
        if not match.missing:
            return
        wanted = {item.digest for item in match.missing}
        fresh = [item for item in match.missing if item.digest not in self._reading]
        self.index.hold(fresh)
        self._reading |= {item.digest: item for item in fresh}
        self._awaited[row.id] = wanted
        row.held = True
        if fresh:
            self.disk.read([item.digest for item in fresh], lambda records: self.post(Fetched(records)))

    def fetched(self, records: Mapping[str, Record | None]) -> list[str]:
        """Take what was read. The rows that wait for nothing more."""
        for digest, record in records.items():
            item = self._reading.pop(digest)
            self.index.release([item])
            self._load(item, record)
        ready = []
        for id, digests in list(self._awaited.items()):
            digests -= records.keys()
            if not digests:
                del self._awaited[id]
                ready.append(id)
        return ready

    def _load(self, item: Item, record: Record | None) -> None:
        cut: Cut | None = None
        try:
            if record is not None:
                cut = self.engine.unpack(record.blobs, record.about["payload"])
        except Exception:  # whatever a file says, it is a miss
            log.warning("stored prefix %s cannot be used", item.digest, exc_info=True)
        if cut is None:
            if self.disk is not None:
                self.disk.remove([item.digest])
            self.index.lost(item)
        else:
            self.index.loaded(item, cut.payload, cut.nbytes)

    # --- rows ---

    def restore(self, row: Row, match: Match) -> bool:
        """Make the row's caches of a stored prefix. False: it is gone, or was no good."""
        pieces = [Piece(b.payload, b.first, b.last, count) for b, count in match.pieces]
        states = match.snapshot.payload if match.snapshot else None
        if any(item.payload is None for item in match.items):
            return False
        try:
            self.engine.restore(row.id, pieces, states)
        except Exception:
            log.exception("%s: a stored prefix cannot be restored", row.id, extra=about(row.id))
            self.engine.drop(row.id)
            for item in match.items:
                self.index.lost(item)
            return False
        row.kept = max(row.kept, match.length)
        return True

    def keep(self, row: Row, *, done: bool = False) -> None:
        """Store what a row in prefill has got, if it is time. `done`: nothing follows."""
        if row.sparse:
            return  # what comes behind a part that was left out has not seen it
        at = row.prefilled
        due = done or at in row.cuts or at - row.kept >= KEPT_TOKENS_MIN
        if due and at > row.kept:
            self._keep(row, row.tokens[:at], states=done or at in row.cuts)
            row.kept = at

    def keep_ended(self, row: Row) -> None:
        """Store what a row has that ends, before its caches are dropped."""
        if row.sparse:
            return
        if self.recall is not None:
            self.recall.keep(row)
        if row.phase is Phase.DECODE:
            if row.answered:
                self._keep(row, (*row.request.tokens, *row.answered), states=True)
        elif row.prefilled >= ENDED_TOKENS_MIN:
            self._keep(row, row.tokens[: row.prefilled], states=True)

    def _keep(self, row: Row, tokens: tuple[int, ...], *, states: bool) -> None:
        salt, end = row.request.salt, len(tokens)
        try:
            stored = keep(
                self.index,
                self.engine,
                row.id,
                tokens,
                salt=salt,
                block_tokens=BLOCK_TOKENS,
                states=states,
            )
        except Exception:  # a cache that cannot be stored is no reason to end its row
            log.exception("%s: cannot be stored", row.id, extra=about(row.id))
            return
        if not stored:
            return
        if row.request.pin and row.request.boundaries:
            self.index.pin(tokens, salt=salt, last=min(end, row.request.boundaries[-1]))
        if end >= DISK_TOKENS_MIN:
            # With all that it hangs on, which may have been too short, or refused, when it was stored.
            self._write([*self.index.find(tokens, salt=salt, limit=end).items, *stored])
        self.fit(self.ram_max)

    # --- bounds ---

    def fit(self, ram_max: int | None) -> None:
        """Forget what goes beyond the bounds. `ram_max`: what rows leave."""
        room = self.ram_max if ram_max is None else min(self.ram_max, ram_max)
        if self.recall is not None:
            self.recall.fit(int(room * self.recall.share))
            room -= self.recall.nbytes
        self.index.shrink_ram(room)

    def _fit_disk(self) -> None:
        if self.disk is not None:
            self.disk.remove([item.digest for item in self.index.shrink_disk(self.disk_max)])

    def _write(self, items: Iterable[Item]) -> None:
        if self.disk is None:
            return
        for item in items:
            if item.disk_bytes or item.digest in self._writing or item.payload is None:
                continue
            blobs, rest = self.engine.pack(item.payload)
            about = {**self.index.describe(item), "payload": rest}
            if self.disk.write(
                Record(item.digest, about, blobs), lambda digest, size: self.post(Written(digest, size))
            ):
                self._writing[item.digest] = item

    def written(self, digest: str, file_bytes: int | None) -> None:
        """A file is there, or could not be written."""
        item = self._writing.pop(digest)
        if file_bytes is not None and not self.index.to_disk(item, file_bytes) and self.disk is not None:
            self.disk.remove([digest])  # forgotten meanwhile
        self._fit_disk()

    def clear(self) -> tuple[int, int]:
        """Forget all that no row is being made of: bytes given back in memory and on disk."""
        before = self.index.ram_bytes, self.index.disk_bytes
        gone = self.index.clear()
        if self.disk is not None:
            self.disk.remove([item.digest for item in gone])
        read = self.recall.clear() if self.recall is not None else 0
        return read + before[0] - self.index.ram_bytes, before[1] - self.index.disk_bytes

    def count(self, row: Row, match: Match | None, miss: str) -> None:
        """A request begins, with what is stored of it."""
        self.index.count(match, prompt_tokens=len(row.request.tokens), miss=miss)

    def drop(self, id: str) -> None:
        """A row has left; what is read for it will be kept for others."""
        self._awaited.pop(id, None)

    def close(self) -> None:
        """Let what is queued for the disk be written, for a moment."""
        if self.disk is not None:
            self.disk.close(wait=True)

    @property
    def name(self) -> str:
        """What is on the disk, by its place; empty: nothing."""
        return self.disk.name if self.disk is not None else ""

    def status(self) -> PrefixStatus:
        status = self.index.status(ram_limit=self.ram_max, disk_limit=self.disk_max)
        if self.recall is None:
            return status
        return msgspec.structs.replace(status, ram_bytes=status.ram_bytes + self.recall.nbytes)


def open_store(model: Model, limits: Limits, post: Callable[[Command], None]) -> Store | None:
    """What this model's requests share. None: nothing, because the model or the settings do not allow it."""
    shape, facts = model.engine.shape, model.facts
    if shape is None or limits.ram == 0:
        return None
    ram_max = limits.ram
    if ram_max is None:
        ram_max = _RAM_DEFAULT if facts.cache_bytes_max is None else facts.cache_bytes_max // 4
    disk = None
    if limits.disk and facts.fingerprint:
        disk = DiskTier(limits.folder / facts.fingerprint, facts.fingerprint)
    recall = open_recall(model.engine.drafter, model.engine.row_bytes(SAMPLED_TOKENS))
    store = Store(model.engine, PrefixIndex(shape), ram_max, post, disk, limits.disk, recall)
    store.open()
    return store
