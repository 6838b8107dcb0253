"""What the journal has of a durable answer: a record of its request, and its output piece by piece. Pure.

The record and the pieces determine every byte that was rendered, and the checkpoints from which the flights
that have not ended continue.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from broker.answers.answer import Answer, AnswerObserver
from broker.answers.open_flights import Headers
from broker.api.rendering import Rendering
from broker.dispatch.checkpoint import Checkpoint
from broker.dispatch.flight import Attempt, Flight, Item
from broker.journal.file import Append, Delete, JournalQueue, Name, Operation, Put, Replace
from protocol.errors import Code
from protocol.messages import Accepted, Failed, Finished, PrefixHit, PromptLogprobs
from protocol.types import Count, Delta, Id, Token

KIND = "answer"
"""Kind of the journal's entries."""


class AnswerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A durable answer. `key`, `digest`: as in `Answer`."""

    rendering: Rendering
    checkpoints: list[Checkpoint]
    """One for each choice, whose output is in the pieces."""
    at: float
    """When the checkpoints were taken."""
    owned_by: str = ""
    """Owner of the answer."""
    owner: bytes = b""
    """Digest of the owner's key, in records of earlier versions."""
    key: str = ""
    digest: bytes = b""
    media: list[bytes] = []
    """Digests of the frames."""
    before: list[bytes] = []
    """Digests of the conversation's pieces, the request's own input last."""
    keeps: bool = False
    """Whether the response is stored when it ends."""
    conversation: str | None = None
    """The conversation that it extends."""
    stream_of: str = ""
    """The client's name of the conversation whose stream it is."""
    background: bool = False
    prompts: int = 1
    own_bytes: int = 0
    """Memory of the request."""


class DeltaRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Consecutive deltas of the attempt `id` that have nothing but texts, from number `sequence` on.

    It has a fourth of the bytes of its deltas. `counts`: number of tokens of each delta; empty: one each.
    `reasoning`: empty if there is none.
    """

    id: Id
    sequence: Count
    tokens: list[Token]
    texts: list[str]
    counts: list[Count] = []
    reasoning: list[str] = []

    def deltas(self) -> Iterator[Delta]:
        """Yield the deltas. Raises `ValueError` if their parts do not fit together."""
        tokens, size = iter(self.tokens), len(self.texts)
        parts = zip(self.texts, self.reasoning or [""] * size, self.counts or [1] * size, strict=True)
        for sequence, (text, reasoning, count) in enumerate(parts, self.sequence):
            own = list(islice(tokens, count))
            yield Delta(id=self.id, sequence=sequence, tokens=own, text=text, reasoning=reasoning)


class Piece(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of one choice, in order: `before` the first delta, `deltas`, and the end. `at`: when it came, in
    seconds since 1970. `headers`, `fingerprint`: what was determined when the response began."""

    at: float
    choice: int = 0
    before: list[Accepted | PrefixHit | PromptLogprobs] = []
    deltas: list[Delta] | DeltaRun = []
    end: Finished | Failed | None = None
    headers: list[tuple[bytes, bytes]] | None = None
    fingerprint: str = ""
    keepalive: bool = False
    """A keepalive that is part of the answer, instead of output."""

    @classmethod
    def of(cls, choice: int, items: Sequence[Item], at: float) -> Piece | None:
        """Return the piece of these items; None if there is nothing to keep.

        That the gateway shut down is not kept: its successor continues.
        """
        end = next((item for item in items if isinstance(item, Finished | Failed)), None)
        if isinstance(end, Failed) and end.code == Code.SHUTTING_DOWN:
            end = None
        before = [item for item in items if isinstance(item, Accepted | PrefixHit | PromptLogprobs)]
        deltas = [item for item in items if isinstance(item, Delta)]
        if end is None and not before and not deltas:
            return None
        return cls(at=at, choice=choice, before=before, deltas=deltas, end=end)

    @property
    def items(self) -> list[Item]:
        deltas = self.deltas.deltas() if isinstance(self.deltas, DeltaRun) else self.deltas
        return [*self.before, *deltas, *([] if self.end is None else [self.end])]


_encoder = msgspec.msgpack.Encoder()
_record: msgspec.msgpack.Decoder[AnswerRecord] = msgspec.msgpack.Decoder(AnswerRecord)
_piece: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)


def encode(value: AnswerRecord | Piece) -> bytes:
    return _encoder.encode(value)


def decode(head: bytes, items: Iterable[bytes]) -> tuple[AnswerRecord, list[Piece]]:
    """Return a record and its pieces. Raises `msgspec.DecodeError` for what another version has written."""
    return _record.decode(head), [_piece.decode(item) for item in items]


class PieceCollector:
    """Output of one answer that is not in the journal yet.

    Deltas that have only texts are taken apart and kept as one `DeltaRun`: as objects, each would have to be
    encoded, and visited by the garbage collector.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._run: DeltaRun | None = None
        self._choice = 0
        self._at = 0.0

    def add(self, choice: int, items: Sequence[Item], at: float) -> None:
        """Add output of a choice."""
        run = self._run if choice == self._choice else None
        for number, item in enumerate(items):
            if not isinstance(item, Delta) or item.likelihoods or item.calls:
                if (piece := Piece.of(choice, items[number:], at)) is not None:
                    self.put(piece)
                return
            if run is None or item.id != run.id:
                run = self._begin_run(choice, item)
            run.tokens.extend(item.tokens)
            run.texts.append(item.text)
            run.counts.append(len(item.tokens))
            run.reasoning.append(item.reasoning)
            self._at = at

    def _begin_run(self, choice: int, first: Delta) -> DeltaRun:
        self._end_run()
        self._choice = choice
        self._run = DeltaRun(
            id=first.id, sequence=first.sequence, tokens=[], texts=[], counts=[], reasoning=[]
        )
        return self._run

    def put(self, piece: Piece) -> None:
        """Add a piece as it is."""
        self._end_run()
        self._pieces.append(encode(piece))

    def take(self) -> list[bytes]:
        """Return all encoded pieces, in order, and begin anew."""
        self._end_run()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            counts = [] if set(run.counts) == {1} else run.counts
            reasoning = run.reasoning if any(run.reasoning) else []
            run = replace(run, counts=counts, reasoning=reasoning)
            self._pieces.append(encode(Piece(at=self._at, choice=self._choice, deltas=run)))


# --- Recorder: writes durable answers to the journal as they change ----------------------------------
#
# What is written is an operation of the journal's queue; nothing here waits. Without a journal nothing is
# written, and answers live as long as the gateway.
#
# Output is collected, and written about once a second and when the answer ends: an operation for each event
# would cost as much as rendering it. A gateway that is killed in between loses the latest output, which its
# successor gets again: from the worker, which keeps what it has sent for ten seconds, or computed again with
# the same seed. Only where readers wait for the disk is each output written at once.
# Output of one attempt is always written before the record of the next attempt: a successor that had only the
# latter would leave out what lies between.


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
        self.name: Name = (KIND, id or secrets.token_hex(12))
        self._flights: dict[int, Flight] = {}
        self._attempts: dict[int, Attempt | None] = {}
        self._collected = PieceCollector()
        self._flushed_at = wall()
        answer.observe(self)

    def begin(self, blobs: Mapping[bytes, bytes]) -> None:
        """Write the record. `blobs`: all that it names, by digest."""
        self._take_checkpoints()
        head = encode(self._answer_record)
        size = len(head) + sum(map(len, blobs.values()))
        self._add(Put(self.name, head, blobs), size)

    def opened(self) -> None:
        """Write the record again, with the checkpoints of flights that were opened or dispatched anew."""
        self.flush()
        self._take_checkpoints()
        head = encode(self._answer_record)
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

    def on_keepalive(self) -> None:
        """Write it at once: without it a later gateway would count other bytes than the client."""
        self._collected.put(Piece(at=self._wall(), keepalive=True))
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
