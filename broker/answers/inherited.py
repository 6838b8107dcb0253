"""Inherited answers: those that the gateway before this one still serves to its clients. Pure.

It reports what it would write to the journal. An answer that has ended is restored then, so that it can be
read again here; one that has not when that gateway ends is continued here. Until then, whoever asks for it
here is refused, and may try again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from broker.answers import record
from broker.answers.record import AnswerRecord
from broker.journal.file import Append, Delete, Entry, Name, Operation, Put, Replace
from protocol.errors import Code, RequestError

log = logging.getLogger(__name__)

BUSY = "The gateway process that is being replaced still serves this answer."
RETRY_S = 1.0

Blobs = dict[bytes, bytes]
Restore = Callable[[Entry, Callable[[bytes], bytes | None]], object]
"""Restores an answer, given its entry and what returns its blobs."""


class InheritedAnswers:
    """The answers of an earlier gateway. For use on the event loop."""

    def __init__(self) -> None:
        self._entries: dict[Name, Entry] = {}
        self._blobs: dict[Name, Blobs] = {}
        self._records: dict[Name, AnswerRecord] = {}
        self.restore: Restore = lambda entry, blob: None

    def add(self, entry: Entry, blobs: Blobs) -> None:
        """Add an answer that the journal has."""
        try:
            self._records[entry.name] = record.decode(entry.head, ())[0]
        except msgspec.DecodeError as error:
            log.warning("an answer of the earlier gateway cannot be read: %s", error)
            return
        self._entries[entry.name], self._blobs[entry.name] = entry, blobs

    def apply(self, operation: Operation, now: float) -> None:
        """Apply an operation of the earlier gateway. `now`: in seconds since 1970."""
        name, entry = operation.name, self._entries.get(operation.name)
        match operation:
            case Put():
                self.add(Entry(name, operation.head, [], operation.ended, now), dict(operation.blobs))
            case Delete():
                self._forget(name)
            case Append() if entry is not None:
                entry.items.append(operation.item)
            case Replace() if entry is not None:
                head = entry.head if operation.head is None else operation.head
                self._entries[name] = Entry(name, head, entry.items, operation.ended, now)
                if operation.ended:
                    self._restore(name)

    def check_key(self, owner: bytes, key: str) -> None:
        """Raise `RequestError` if the earlier gateway serves the answer of this idempotency key."""
        if any(told.owner == owner and told.key == key for told in self._records.values()):
            raise RequestError(Code.SHUTTING_DOWN, BUSY, retry_after_s=RETRY_S)

    def check_name(self, owner: bytes, id: str) -> None:
        """Raise `RequestError` if the earlier gateway serves the response with this id."""
        if any(told.owner == owner and told.rendering.id == id for told in self._records.values()):
            raise RequestError(Code.SHUTTING_DOWN, BUSY, retry_after_s=RETRY_S)

    def end(self) -> None:
        """Continue what is left, because the earlier gateway has ended."""
        for name in list(self._entries):
            self._restore(name)

    def _restore(self, name: Name) -> None:
        entry, blobs = self._entries[name], self._blobs[name]
        self._forget(name)
        self.restore(entry, blobs.get)

    def _forget(self, name: Name) -> None:
        for table in (self._entries, self._blobs, self._records):
            table.pop(name, None)
