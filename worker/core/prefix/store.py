"""Prefix store: stores and restores KV cache prefixes in memory and on disk. On the model thread.

The index maps prefixes to stored items. The engine copies them from rows and restores rows from them. The
disk tier reads and writes on its own thread, and replies through the loop's inbox. Nothing here can fail a
request: what cannot be stored or restored is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from protocol.common.log_context import about
from protocol.types import PrefixStatus
from worker.core.commands import Command, DiskSpace, Fetched, Written
from worker.core.memory_relief import Relief
from worker.core.prefix.disk import DiskTier
from worker.core.prefix.folder import Record, ledger_of
from worker.core.prefix.index import BLOCK_TOKENS, Match, PrefixIndex, keep
from worker.core.prefix.sharing import REUSED_TOKENS_MIN
from worker.core.prefix.tree import Block, Item
from worker.core.prefix.write_budget import may_write
from worker.core.rows import Group, Phase, Row
from worker.interfaces import Engine, Model
from worker.process.device_errors import raise_if_device_failed
from worker.values import CacheSegment, CacheSlice, EngineRequest

log = logging.getLogger(__name__)

KEPT_TOKENS_MIN = 256
"""Interval in tokens at which a running prefill is stored."""
READ_SILENCE_S_MAX = 5.0
"""Silence on outstanding reads after which no row waits for the disk until it replies again."""
READ_WAIT_S_MAX = 60.0
"""Maximum wait of a row for its prefix from a disk that replies."""


_RAM_DEFAULT = 2**30
"""Bytes of prefixes in memory where the memory for caches is unknown."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits in bytes: in memory (None: all that rows leave), and on disk, in `folder`, where
    at most `disk_share` of the free space is taken."""

    ram: int | None
    disk: int
    folder: Path
    disk_share: float = 1.0
    writes: int | None = None
    """Bytes written a day, by all models (None: a share of the disk's size)."""


def disk_limit(disk_max: int, share: float, room: int | None) -> int:
    """Return the bytes on disk: at most `disk_max`, and at most `share` of the `room`, which is free or
    taken by the cache itself. None: unknown."""
    return disk_max if room is None else min(disk_max, int(share * room))


@dataclass(slots=True)
class PrefixStore:
    """Stored prefixes of one model. `post` puts a command into the loop's inbox, from any thread.

    `ram_max`: bytes in memory. `disk`: None without a disk tier; then `disk_max` and `disk_share` are
    ignored.
    """

    engine: Engine
    index: PrefixIndex
    ram_max: int
    post: Callable[[Command], None]
    disk: DiskTier | None = None
    disk_max: int = 0
    disk_share: float = 1.0
    ram_share: float = 1.0
    """Share of `ram_max` that may be taken now."""
    spare: Callable[[], int | None] = lambda: None
    """Returns the memory that rows leave by what they have reserved; None: without limit."""
    _writing: dict[str, Item] = field(default_factory=dict)
    _reading: dict[str, Item] = field(default_factory=dict)
    _waiting: list[Row] = field(default_factory=list)
    """Rows that wait for blocks."""
    _disk_answered_at: float = 0.0
    """Time of the disk's last reply, or of the first read after all were answered."""
    _is_silent: bool = False
    read_timeouts: int = 0
    """Number of rows whose wait for the disk timed out."""

    def obey(self, command: Fetched | Written | DiskSpace, now: float) -> None:
        """Take a reply of the disk tier; rows that waited for it alone go on."""
        match command:
            case Fetched(records):
                for row in self.fetched(records, now):
                    row.is_blocked = False
            case Written(digest, file_bytes):
                self.written(digest, file_bytes)
            case DiskSpace():
                self.fit_disk()

    # --- from the disk ---

    def open(self) -> None:
        """Index what is on disk, and remove orphans, blocks whose parents are gone."""
        if self.disk is None:
            return
        began = time.monotonic()
        found = self.disk.scan()
        self.disk.remove(self.index.restore_from_disk(found))
        self.fit_disk()
        if found:
            took = time.monotonic() - began
            log.info(
                "found %d stored prefixes on disk, %d bytes, in %.1f s",
                len(found),
                self.index.disk_bytes,
                took,
            )

    def fetch(self, row: Row, now: float) -> None:
        """Hold a row if part of its longest stored prefix is on disk only; read that part block by block."""
        if self.disk is None or self._is_silent:
            return
        match = self.index.find(row.tokens, salt=row.request.salt, limit=row.reusable)
        if not match.missing:
            return
        if not self._reading:
            self._disk_answered_at = now
        self._waiting.append(row)
        row.is_blocked, row.awaited, row.awaited_since = True, {item.digest for item in match.missing}, now
        fresh = [item for item in match.missing if item.digest not in self._reading]
        self.index.hold(fresh)
        for item in fresh:
            self._reading[item.digest] = item
            self.disk.read([item.digest], lambda records: self.post(Fetched(records)), self._buffer(item))

    def _buffer(self, item: Item) -> memoryview | None:
        """Return memory of the engine to read an item into; None: there is none, so it will be copied."""
        if sum(each.disk_bytes for each in self._reading.values()) > self.ram_max:
            return None
        try:
            return self.engine.allocate(item.disk_bytes)
        except Exception as error:  # the read goes on without
            raise_if_device_failed(error)
            log.warning("no memory to read a stored prefix into: %s", error)
            return None

    def known_tokens(self, request: EngineRequest) -> int:
        """Return the length of a prompt's longest stored prefix."""
        return self.index.find(request.tokens, salt=request.salt, limit=len(request.tokens) - 1).length

    def fetched(self, records: Mapping[str, Record | None], now: float) -> list[Row]:
        """Load blocks read from disk, and return the rows that wait for no more."""
        self._disk_answered_at, self._is_silent = now, False
        for digest, record in records.items():
            item = self._reading.pop(digest)
            self.index.release([item])
            self._load(item, record)
        for row in self._waiting:
            row.awaited.difference_update(records)
        return self._go_on([row for row in self._waiting if not row.awaited])

    def overdue(self, now: float) -> list[Row]:
        """Return the rows that go on without the disk: they waited too long, or it is silent.

        To be called after all its replies were handled.
        """
        self._is_silent = bool(self._reading) and now - self._disk_answered_at > READ_SILENCE_S_MAX
        late = self._go_on([
            row for row in self._waiting if self._is_silent or now - row.awaited_since > READ_WAIT_S_MAX
        ])  # fmt: skip
        self.read_timeouts += len(late)
        return late

    def _go_on(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            self.drop(row)
        return rows

    def _load(self, item: Item, record: Record | None) -> None:
        cut: CacheSlice | None = None
        try:
            if record is not None:
                cut = self.engine.unpack(record.blobs, record.about["payload"])
        except Exception as error:  # an unreadable file is a miss
            raise_if_device_failed(error)
            log.warning("stored prefix %s cannot be used", item.digest, exc_info=True)
        if cut is None:
            if self.disk is not None:
                self.disk.remove([item.digest])
            self.index.lost(item)
        else:
            self.index.loaded(item, cut.payload, cut.nbytes)

    # --- rows ---

    def restore(self, row: Row, match: Match) -> bool:
        """Restore the row's caches from a stored prefix. Return False if it was evicted or is unusable."""
        pieces = [CacheSegment(b.payload, b.first, b.last, count) for b, count in match.pieces]
        states = match.snapshot.payload if match.snapshot else None
        if any(item.payload is None for item in match.items):
            return False
        try:
            self.engine.restore(row.id, pieces, states)
        except Exception as error:
            raise_if_device_failed(error)
            log.exception("%s: a stored prefix cannot be restored", row.id, extra=about(row.id))
            self.engine.drop(row.id)
            for item in match.items:
                self.index.lost(item)
            return False
        row.stored_upto = max(row.stored_upto, match.length)
        return True

    def keep(self, row: Row, *, done: bool = False) -> None:
        """Store the prefix of a row in prefill, if it is due. `done`: the prefill is complete."""
        if row.is_private:
            return
        at = row.prefilled
        is_cut = done or at in row.snapshot_positions
        if (is_cut or at - row.stored_upto >= KEPT_TOKENS_MIN) and at > row.stored_upto:
            self._store_row(row, row.tokens[:at], states=is_cut)
            self.fit(self.spare())
            row.stored_upto = at

    def store_ended_row(self, row: Row) -> None:
        """Store the prefix of a row that ends, before its caches are dropped, and write what is worth it."""
        if row.is_private:
            return
        tokens = row.tokens[: row.prefilled]
        is_decoding = row.phase is Phase.DECODE
        if is_decoding and row.has_decoded:
            # Until it has decoded, its last token is not in its caches; its prompt is stored.
            tokens = (*row.request.tokens, *row.answered)
        if row.has_decoded if is_decoding else row.prefilled >= REUSED_TOKENS_MIN:
            self._store_row(row, tokens, states=True)
        # Without boundaries it is no conversation, which a next turn would continue.
        self._write(tokens, row.request.salt, ends_turn=is_decoding and bool(row.request.boundaries))
        self.fit(self.spare())

    def _store_row(self, row: Row, tokens: tuple[int, ...], *, states: bool) -> None:
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
        except Exception as error:  # the row goes on without
            raise_if_device_failed(error)
            log.exception("%s: its cache cannot be stored", row.id, extra=about(row.id))
            return
        row.stored = stored[-1] if stored else row.stored
        if not stored:
            return
        if row.request.pin and row.request.boundaries:
            self.index.pin(tokens, salt=salt, last=min(end, row.request.boundaries[-1]))

    # --- bounds ---

    def fit(self, ram_max: int | None, groups: Iterable[Group] = (), rows: Iterable[Row] = ()) -> None:
        """Evict prefixes beyond the memory limit. `ram_max`: the memory that rows leave.

        `groups`: what they restore is not evicted. It and the rows' caches exceed the limit for a moment, as
        does a row's copy when it ends; otherwise a conversation that takes more than half of the
        memory would be computed again at each turn. `rows`: those that decode. What they alone use is evicted
        first, because it is in their caches, from which it is stored again when they end.
        """
        limit = self._ram_limit if ram_max is None else min(self._ram_limit, ram_max)
        if self.index.ram_bytes <= limit:
            return
        chunks = [chunk for group in groups for chunk in group]
        held = [item for chunk in chunks if chunk.match for item in chunk.match.items]
        self.index.hold(held)
        self.index.shrink_ram(limit, [row.stored for row in rows if row.stored])
        self.index.release(held)

    def relieve(self, relief: Relief) -> None:
        """Keep to what a stage of memory relief leaves to the cache from now on."""
        self.ram_share = relief.cache_share
        self.fit(0 if relief >= Relief.DROP_IDLE else None)

    @property
    def _ram_limit(self) -> int:
        return int(self.ram_share * self.ram_max)

    def fit_disk(self) -> None:
        """Evict prefixes on disk beyond its limit, which shrinks when others fill the disk."""
        if self.disk is not None:
            self.disk.remove([item.digest for item in self.index.shrink_disk(self._disk_limit())])

    def _disk_limit(self) -> int:
        if self.disk is None:
            return self.disk_max
        return disk_limit(self.disk_max, self.disk_share, self.disk.room)

    def _write(self, tokens: tuple[int, ...], salt: str, *, ends_turn: bool) -> None:
        """Write what is stored of a prefix and worth it, up to the first block that is not written: nothing
        behind that would be found."""
        if self.disk is None or len(tokens) < BLOCK_TOKENS:
            return  # computing a shorter one again costs less than reading it
        burst = self.disk.budget.burst
        for item in self.index.stored(tokens, salt=salt):
            if item.disk_bytes or item.digest in self._writing:
                continue
            if item.payload is not None and may_write(
                item, item.nbytes, self.disk.writes_left, burst, ends_turn=ends_turn
            ):
                self._write_item(self.disk, item)
            if isinstance(item, Block) and item.digest not in self._writing:
                break

    def _write_item(self, disk: DiskTier, item: Item) -> None:
        blobs, rest = self.engine.pack(item.payload)
        about = {**self.index.describe(item), "payload": rest}
        if disk.write(
            Record(item.digest, about, blobs), lambda digest, size: self.post(Written(digest, size))
        ):
            self._writing[item.digest] = item

    def written(self, digest: str, file_bytes: int | None) -> None:
        """Record that a file was written with `file_bytes` bytes; None: the write failed."""
        item = self._writing.pop(digest)
        if file_bytes is not None and not self.index.to_disk(item, file_bytes) and self.disk is not None:
            self.disk.remove([digest])  # evicted meanwhile
        self.fit_disk()

    def clear(self, namespace: str = "") -> tuple[int, int]:
        """Evict a namespace's prefixes that are not in use; return the bytes freed in memory and on disk."""
        before = self.index.ram_bytes, self.index.disk_bytes
        gone = self.index.clear(namespace)
        if self.disk is not None:
            self.disk.remove([item.digest for item in gone])
        return before[0] - self.index.ram_bytes, before[1] - self.index.disk_bytes

    def count(self, row: Row, match: Match | None, miss: str) -> None:
        """Count the prefix hit or miss of a request that begins."""
        self.index.count(match, prompt_tokens=len(row.request.tokens), miss=miss)

    def drop(self, row: Row) -> None:
        """End a row's wait, if it waits; the blocks being read for it are stored for others."""
        if row in self._waiting:
            self._waiting.remove(row)
        row.awaited = set()

    def close(self) -> None:
        """Close the disk tier, and wait a moment for its queued writes."""
        if self.disk is not None:
            self.disk.close(wait=True)

    @property
    def name(self) -> str:
        """Name of the disk tier's location; empty without one."""
        return self.disk.name if self.disk is not None else ""

    def status(self) -> PrefixStatus:
        status = self.index.status(ram_limit=self._ram_limit, disk_limit=self._disk_limit())
        status = msgspec.structs.replace(status, read_timeouts=self.read_timeouts)
        if self.disk is None:
            return status
        return msgspec.structs.replace(
            status,
            written_bytes=self.disk.written,
            writes_limit=self.disk.budget.day_bytes,
            writes_left=self.disk.writes_left,
        )


def open_store(model: Model, limits: StoreLimits, post: Callable[[Command], None]) -> PrefixStore | None:
    """Open the prefix store of a model; None if the model or the settings do not allow one."""
    shape, facts = model.engine.shape, model.info
    if shape is None or limits.ram == 0:
        return None
    ram_max = _RAM_DEFAULT if limits.ram is None else limits.ram
    disk = None
    if limits.disk and facts.fingerprint:
        disk = DiskTier(
            limits.folder / facts.fingerprint,
            facts.fingerprint,
            ledger_of(limits.folder, limits.writes),
            on_space=lambda: post(DiskSpace()),
        )
    store = PrefixStore(model.engine, PrefixIndex(shape), ram_max, post, disk, limits.disk, limits.disk_share)
    store.open()
    return store
