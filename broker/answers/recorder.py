"""Recorder: writes durable answers and stored responses to the journal as they change. Pure.

What is written is an operation of the journal's queue; nothing here waits. Without a journal nothing is
written, and answers live as long as the gateway.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from broker.answers import record
from broker.answers.answer import DurableAnswer, Headers
from broker.answers.record import AnswerRecord, Piece
from broker.dialects.responses.store import Owner, StoredItems, StoredResponse
from broker.dispatch.checkpoint import Checkpoint
from broker.dispatch.flight import Attempt, Flight, Item
from broker.journal.file import Append, Delete, Entry, Name, Operation, Put, Replace
from protocol.errors import Code
from protocol.messages import Failed

RESPONSE = "response"
"""Kind of the entries of stored responses and conversations."""


class JournalQueue(Protocol):
    """The journal, for those who write."""

    def add(self, operation: Operation, nbytes: int = 0) -> int: ...


class AnswerRecorder:
    """Writes one answer: its record when it is opened or dispatched anew, its output, and its end."""

    def __init__(
        self,
        journal: JournalQueue,
        answer: DurableAnswer,
        told: AnswerRecord,
        checkpoint: Callable[[Flight], Checkpoint],
        fingerprint: Callable[[], str],
        wall: Callable[[], float],
        id: str = "",
    ) -> None:
        """`id`: of the entry, if the journal has one already. `wall`: seconds since 1970."""
        self._journal = journal
        self._answer = answer
        self._told = told
        self._checkpoint = checkpoint
        self._fingerprint = fingerprint
        self._wall = wall
        self.name: Name = (record.KIND, id or secrets.token_hex(12))
        self._attempts: dict[int, Attempt | None] = {}
        answer.on_items, answer.on_begin = self.on_items, self.on_begin
        self._forget = answer.on_over
        answer.on_over = self._on_over
        answer.on_drop = self.delete

    def begin(self, blobs: Mapping[bytes, bytes]) -> None:
        """Write the record. `blobs`: all that it names, by digest."""
        self._take_checkpoints()
        head = record.encode(self._told)
        size = len(head) + sum(map(len, blobs.values()))
        self._answer.written = self._journal.add(Put(self.name, head, blobs), size)

    def opened(self) -> None:
        """Write the record again, with the checkpoints of flights that were opened or dispatched anew."""
        self._take_checkpoints()
        head = record.encode(self._told)
        self._journal.add(Replace(self.name, head), len(head))

    def _take_checkpoints(self) -> None:
        taken = list(self._told.checkpoints)
        for choice, flight in self._answer.flights:
            self._attempts[choice] = flight.attempt
            if flight.terminal is None:
                taken[choice] = record.bare(self._checkpoint(flight))
        self._told = replace(self._told, checkpoints=taken, at=self._wall())

    def on_items(self, choice: int, items: Sequence[Item]) -> None:
        at = self._answer.at = self._wall()
        if any(self._attempts.get(each) is not flight.attempt for each, flight in self._answer.flights):
            self.opened()
        if (piece := Piece.of(choice, items, at)) is not None:
            self._append(piece)

    def on_begin(self, headers: Headers) -> None:
        self._append(Piece(at=self._wall(), headers=list(headers), fingerprint=self._fingerprint()))

    def _append(self, piece: Piece) -> None:
        encoded = record.encode(piece)
        self._answer.written = self._journal.add(Append(self.name, encoded), len(encoded))

    def _on_over(self, answer: DurableAnswer) -> None:
        self._forget(answer)
        if not answer.failed:
            self._journal.add(Replace(self.name, None, ended=True))
        elif not _is_shutdown(answer):
            self.delete()

    def delete(self) -> None:
        self._journal.add(Delete(self.name))


def _is_shutdown(answer: DurableAnswer) -> bool:
    ends = [flight.terminal for _, flight in answer.flights]
    return any(isinstance(end, Failed) and end.code == Code.SHUTTING_DOWN for end in ends)


# --- stored responses --------------------------------------------------------------------------------


class _StoredRecord(Struct, frozen=True, kw_only=True):
    owner: bytes
    id: str
    head: bytes
    pieces: list[bytes]


_stored: msgspec.msgpack.Decoder[_StoredRecord] = msgspec.msgpack.Decoder(_StoredRecord)


class StoreRecorder:
    """A `store.StoreLog`: the journal has what the store of responses has."""

    def __init__(self, journal: JournalQueue) -> None:
        self._journal = journal

    def put(self, owner: Owner, id: str, kept: StoredResponse) -> None:
        blobs = blobs_of(kept.pieces)
        digests = [digest_of(piece) for piece in kept.pieces]
        head = msgspec.msgpack.encode(_StoredRecord(owner=owner, id=id, head=kept.head, pieces=digests))
        size = len(head) + sum(map(len, blobs.values()))
        self._journal.add(Put(_name(owner, id), head, blobs, ended=True), size)

    def drop(self, owner: Owner, id: str) -> None:
        self._journal.add(Delete(_name(owner, id)))


def stored_of(
    entry: Entry, blob: Callable[[bytes], bytes | None], shared: dict[bytes, StoredItems]
) -> tuple[Owner, str, StoredResponse] | None:
    """Return owner, id and response of an entry; None if a part is missing. `shared`: pieces by digest."""
    told = _stored.decode(entry.head)
    for digest in told.pieces:
        if digest not in shared:
            data = blob(digest)
            if data is None:
                return None
            shared[digest] = StoredItems(data, digest=digest)
    return told.owner, told.id, StoredResponse(told.head, tuple(shared[digest] for digest in told.pieces))


def blobs_of(pieces: Sequence[StoredItems]) -> dict[bytes, bytes]:
    return {digest_of(piece): piece.encoded for piece in pieces}


def digest_of(piece: StoredItems) -> bytes:
    """Return the digest of a piece, computed once."""
    if not piece.digest:
        piece.digest = sha256(piece.encoded).digest()
    return piece.digest


def _name(owner: Owner, id: str) -> Name:
    return RESPONSE, f"{owner.hex()}:{id}"
