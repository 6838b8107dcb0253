"""What the journal has of a durable answer: a record of its request, and its output piece by piece. Pure.

The record and the pieces determine every byte that was rendered, and the checkpoints from which the flights
that have not ended continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from broker.dialects.rendering import Rendering
from broker.dispatch.checkpoint import AttemptRecord, Checkpoint
from broker.dispatch.flight import Item
from protocol.errors import Code
from protocol.messages import Accepted, Failed, Finished, PrefixHit, PromptLogprobs
from protocol.types import Delta

KIND = "answer"
"""Kind of the journal's entries."""


class AnswerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A durable answer. `owner`, `key`, `digest`, `name`: as in `DurableAnswer`. `at`: when the checkpoints
    were taken. Their tokens and what else follows from the output is in the pieces. `media`: digests of the
    frames. `before`: digests of the conversation's pieces, the request's own input last. `keeps`: the
    response is stored when it ends; `conversation`: the one that it extends. `prompts`: number of prompts."""

    owner: bytes
    rendering: Rendering
    checkpoints: list[Checkpoint]
    at: float
    key: str = ""
    digest: bytes = b""
    name: str = ""
    media: list[bytes] = []
    before: list[bytes] = []
    keeps: bool = False
    conversation: str | None = None
    background: bool = False
    prompts: int = 1
    own_bytes: int = 0


class Piece(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of one choice, in order: `before` the first delta, `deltas`, and the end. `at`: when it came, in
    seconds since 1970. `headers`, `fingerprint`: what was determined when the response began."""

    at: float
    choice: int = 0
    before: list[Accepted | PrefixHit | PromptLogprobs] = []
    deltas: list[Delta] = []
    end: Finished | Failed | None = None
    headers: list[tuple[bytes, bytes]] | None = None
    fingerprint: str = ""

    @classmethod
    def of(cls, choice: int, items: Sequence[Item], at: float) -> Piece | None:
        """Return the piece of these items; None if there is nothing to keep.

        That the gateway shut down is not kept: its successor continues.
        """
        if isinstance(items[0], Delta) and isinstance(items[-1], Delta):  # most pieces are of this kind
            return cls(at=at, choice=choice, deltas=list(items))  # type: ignore[arg-type]
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
        return [*self.before, *self.deltas, *([] if self.end is None else [self.end])]


_encoder = msgspec.msgpack.Encoder()
_record: msgspec.msgpack.Decoder[AnswerRecord] = msgspec.msgpack.Decoder(AnswerRecord)
_piece: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)


def encode(value: AnswerRecord | Piece) -> bytes:
    return _encoder.encode(value)


def decode(head: bytes, items: Iterable[bytes]) -> tuple[AnswerRecord, list[Piece]]:
    """Return a record and its pieces. Raises `msgspec.DecodeError` for what another version has written."""
    return _record.decode(head), [_piece.decode(item) for item in items]


def bare(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without what follows from the output."""
    attempt = checkpoint.attempt
    if attempt is not None:
        attempt = replace(attempt, accepted=False, reused=False, deltas=0, scored=0)
    return replace(
        checkpoint,
        tokens=[],
        scored=0,
        accepted=False,
        prompt_tokens=0,
        relaxed=[],
        reuse=None,
        attempt=attempt,
    )


def advanced(checkpoint: Checkpoint, items: Iterable[Item]) -> Checkpoint:
    """Return a checkpoint that was `bare`, with the output so far."""
    for item in items:
        attempt = checkpoint.attempt
        is_own = attempt is not None and getattr(item, "id", "") == attempt.id
        if attempt is not None and is_own:
            checkpoint = replace(checkpoint, attempt=_advanced(attempt, item))
        match item:
            case Accepted():
                checkpoint = replace(
                    checkpoint, accepted=True, prompt_tokens=item.prompt_tokens, relaxed=item.relaxed
                )
            case PrefixHit():
                checkpoint = replace(checkpoint, reuse=item.reuse)
            case PromptLogprobs():
                checkpoint = replace(checkpoint, scored=checkpoint.scored + len(item.tokens))
            case Delta():
                checkpoint.tokens.extend(item.tokens)
    return checkpoint


def _advanced(attempt: AttemptRecord, item: Item) -> AttemptRecord:
    match item:
        case Accepted():
            return replace(attempt, accepted=True)
        case PrefixHit():
            return replace(attempt, reused=True)
        case PromptLogprobs():
            return replace(attempt, scored=attempt.scored + 1)
        case Delta():
            return replace(attempt, deltas=item.sequence + 1)
    return attempt
