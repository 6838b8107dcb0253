"""What the journal has of a durable answer: a record of its request, and its output piece by piece. Pure.

The record and the pieces determine every byte that was rendered, and the checkpoints from which the flights
that have not ended continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from broker.api.rendering import Rendering
from broker.dispatch.checkpoint import Checkpoint
from broker.dispatch.flight import Item
from protocol.errors import Code
from protocol.messages import Accepted, Failed, Finished, PrefixHit, PromptLogprobs
from protocol.types import Count, Delta, Id, Token

KIND = "answer"
"""Kind of the journal's entries."""


class AnswerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A durable answer. `key`, `digest`, `name`: as in `Answer`."""

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
    name: str = ""
    media: list[bytes] = []
    """Digests of the frames."""
    before: list[bytes] = []
    """Digests of the conversation's pieces, the request's own input last."""
    keeps: bool = False
    """Whether the response is stored when it ends."""
    conversation: str | None = None
    """The conversation that it extends."""
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
