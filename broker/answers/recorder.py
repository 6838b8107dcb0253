"""Recorder: writes durable answers to the journal as they change. Pure.

What is written is an operation of the journal's queue; nothing here waits. Without a journal nothing is
written, and answers live as long as the gateway.

Output is collected, and written about once a second and when the answer ends: an operation for each event
would cost as much as rendering it. A gateway that is killed in between loses the latest output, which its
successor gets again: from the worker, which keeps what it has sent for ten seconds, or computed again with
the same seed. Only where readers wait for the disk is each output written at once.
Output of one attempt is always written before the record of the next attempt: a successor that had only the
latter would leave out what lies between.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from broker.answers import record
from broker.answers.answer import Answer, AnswerObserver
from broker.answers.open_flights import Headers
from broker.answers.record import AnswerRecord, Piece, PieceCollector
from broker.api.responses.store import JournalQueue
from broker.dispatch.checkpoint import Checkpoint
from broker.dispatch.flight import Attempt, Flight, Item
from broker.journal.file import Append, Delete, Name, Operation, Put, Replace
from protocol.errors import Code
from protocol.messages import Failed


class AnswerRecorder(AnswerObserver):
    """Writes one answer: its record when it is opened or dispatched anew, its output, and its end."""

    def __init__(
        self,
        journal: JournalQueue,
        answer: Answer,
        answer_record: AnswerRecord,
        checkpoint: Callable[[Flight], Checkpoint],
        fingerprint: Callable[[], str],
        wall: Callable[[], float],
        id: str = "",
    ) -> None:
        """`id`: of the entry, if the journal has one already. `wall`: seconds since 1970."""
        self._journal = journal
        self._answer = answer
        self._answer_record = answer_record
        self._checkpoint = checkpoint
        self._fingerprint = fingerprint
        self._wall = wall
        self.name: Name = (record.KIND, id or secrets.token_hex(12))
        self._flights: dict[int, Flight] = {}
        self._attempts: dict[int, Attempt | None] = {}
        self._collected = PieceCollector()
        self._flushed_at = wall()
        answer.observe(self)

    def begin(self, blobs: Mapping[bytes, bytes]) -> None:
        """Write the record. `blobs`: all that it names, by digest."""
        self._take_checkpoints()
        head = record.encode(self._answer_record)
        size = len(head) + sum(map(len, blobs.values()))
        self._add(Put(self.name, head, blobs), size)

    def opened(self) -> None:
        """Write the record again, with the checkpoints of flights that were opened or dispatched anew."""
        self.flush()
        self._take_checkpoints()
        head = record.encode(self._answer_record)
        self._journal.add(Replace(self.name, head), len(head))

    def _take_checkpoints(self) -> None:
        taken = list(self._answer_record.checkpoints)
        self._flights = dict(self._answer.flights)
        for choice, flight in self._flights.items():
            self._attempts[choice] = flight.attempt
            if flight.terminal is None:
                taken[choice] = self._checkpoint(flight)
        self._answer_record = replace(self._answer_record, checkpoints=taken, at=self._wall())

    def on_items(self, choice: int, items: list[Item]) -> None:
        """Collect output that is about to be rendered."""
        answer, flight = self._answer, self._flights.get(choice)
        answer.at = self._wall()
        if flight is not None and flight.attempt not in (None, self._attempts[choice]):
            former, items = _divided(items, flight.attempt)
            if former:
                self._collected.add(choice, former, answer.at)
            self.opened()
        if items:
            self._collected.add(choice, items, answer.at)
        if answer.disk is not None:
            self.flush()

    def on_begin(self, headers: Headers) -> None:
        self._collected.put(Piece(at=self._wall(), headers=list(headers), fingerprint=self._fingerprint()))
        if self._answer.disk is not None:
            self.flush()

    def on_flush(self, age_s: float) -> None:
        """Write what was collected, if nothing was written for `age_s` seconds."""
        if abs(self._wall() - self._flushed_at) >= age_s:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        self._flushed_at = self._wall()
        for piece in self._collected.take():
            self._add(Append(self.name, piece), len(piece))

    def _add(self, operation: Operation, nbytes: int) -> None:
        number = self._journal.add(operation, nbytes)
        if self._answer.disk is not None:
            self._answer.disk.written = number

    def on_over(self, answer: Answer) -> None:
        """Write the rest and the end, or delete what failed, unless the next gateway continues it."""
        has_failed = answer.end is not None and answer.end.has_failed
        if has_failed and not self._is_shutdown():
            self.on_drop()
            return
        self.flush()
        if not has_failed:
            self._journal.add(Replace(self.name, None, ended=True))

    def on_drop(self) -> None:
        self._collected.take()
        self._journal.add(Delete(self.name))

    def _is_shutdown(self) -> bool:
        ends = [flight.terminal for flight in self._flights.values()]
        return any(isinstance(end, Failed) and end.code == Code.SHUTTING_DOWN for end in ends)


def _divided(items: list[Item], attempt: Attempt | None) -> tuple[list[Item], list[Item]]:
    """Return what came before the first output of an attempt, and the rest."""
    own = (number for number, item in enumerate(items) if attempt is not None and item.id == attempt.id)
    first = next(own, len(items))
    return items[:first], items[first:]
