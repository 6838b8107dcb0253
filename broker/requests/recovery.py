"""Recovery: what the journal has of an earlier gateway is put back before the first request is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import groupby

import msgspec
from msgspec.structs import replace

from broker.answers import record
from broker.answers.answer import Answer
from broker.answers.open_flights import OpenFlights
from broker.answers.record import AnswerRecord, Piece
from broker.api.rendering import ResponseRendering
from broker.api.responses import store
from broker.api.responses.store import StoredItems
from broker.dialects.renderers import Renderer
from broker.dispatch.flight import Flight, Item
from broker.journal.file import SERVED, Delete, Entry, Put
from broker.journal.journal import Journal
from broker.requests import access_log, background
from broker.requests.durable import Described, clock_of, fingerprint, keeper, recorder_of
from broker.requests.opening_headers import opening_headers
from broker.state import GatewayState
from protocol.errors import RequestError
from protocol.messages import Ready

log = logging.getLogger(__name__)

_ready: msgspec.msgpack.Decoder[Ready] = msgspec.msgpack.Decoder(Ready)

Blob = Callable[[bytes], bytes | None]
"""Returns the blob with a digest."""
Shared = dict[bytes, StoredItems]
"""Pieces of conversations, by digest."""


def recover(gateway: GatewayState) -> None:
    """Put back durable answers; what cannot be put back is removed from the journal."""
    journal = gateway.journal
    if not journal.is_durable:
        return
    # Earlier versions had the digest of a key as the owner of what it stores.
    journal.rename_owners({digest.hex(): name for digest, name in gateway.api_keys_store.owners().items()})
    _expect_workers(gateway, journal)
    gateway.answers.committed = lambda: journal.committed
    shared: Shared = {}
    answers = sum(
        _restore_or_delete(gateway, journal, entry, shared) for entry in journal.entries(record.KIND)
    )
    if answers:
        log.info("restored %d durable answers", answers)


def _expect_workers(gateway: GatewayState, journal: Journal) -> None:
    """Expect the workers of the gateway before this one, and note those of this one for the next."""
    for entry in journal.entries(SERVED):
        with suppress(msgspec.MsgspecError):  # of another version
            gateway.dispatcher.catalogue.expect(_ready.decode(entry.head))

    def note(model: str, ready: Ready | None) -> None:
        name, head = (SERVED, model), b"" if ready is None else msgspec.msgpack.encode(ready)
        journal.add(Delete(name) if ready is None else Put(name, head), len(head))

    gateway.dispatcher.on_served = note


def _restore_or_delete(gateway: GatewayState, journal: Journal, entry: Entry, shared: Shared) -> bool:
    """Put an answer back, or remove it from the journal if that is not possible."""
    try:
        restored = _restore(gateway, journal.blob, entry, shared)
    except (msgspec.MsgspecError, ValueError, OSError, RequestError) as error:
        log.warning("an answer of the journal cannot be restored: %s", error)
        restored = False
    if not restored:
        journal.add(Delete(entry.name))
    return restored


def _restore(gateway: GatewayState, blob: Blob, entry: Entry, shared: Shared) -> bool:
    """Put an answer back. Return False if nobody may come for it any more, or a part is missing."""
    head, pieces = record.decode(entry.head, entry.items)
    owner = head.owned_by or gateway.api_keys_store.owners().get(head.owner, head.owner.hex())
    head = replace(head, owned_by=owner, owner=b"")
    ended = {piece.choice for piece in pieces if piece.end is not None}
    is_over = len(ended) == len(head.checkpoints)
    at = max(entry.at, *(piece.at for piece in pieces), 0.0)
    if (is_over or not head.background) and time.time() - at > gateway.answers.window_s:
        return False
    media, before = _blobs(blob, head.media), _pieces(blob, head.before, shared)
    if media is None or before is None:
        return False
    described = Described(head.rendering, before, keeps=head.keeps, conversation=head.conversation)
    answer = gateway.answers.new(owner, key=head.key, digest=head.digest)
    answer.nbytes, answer.in_background = head.own_bytes, head.background
    renderer = _renderer(gateway, answer, head, described, pieces, is_over=is_over)
    model = head.checkpoints[0].model
    if head.background:
        answer.begin(renderer)
    else:
        answer.renderer = renderer
    _replay(answer, pieces)
    recorder = recorder_of(gateway, answer, head, model, entry.name[1])
    if head.background:
        gateway.answers.wait_for_disk(answer)
    if answer.over:
        return True
    unfinished = [choice for choice in range(len(head.checkpoints)) if choice not in ended]

    def start() -> None:
        flights = OpenFlights(
            _flights(gateway, head, pieces, unfinished, media),
            opening=partial(opening_headers, head.prompts),
            on_end=partial(access_log.log_end, "", head.checkpoints[0].key),
            choices=unfinished,
        )
        answer.open(flights, renderer)
        recorder.opened()

    if any(checkpoint.attempts for checkpoint in head.checkpoints):
        try:
            start()
            return True
        except RequestError as error:
            if not error.kind.retryable:
                gateway.answers.drop(answer)
                raise
    background.defer(gateway, answer, model, start)  # so many were restored that it has to wait
    return True


def _replay(answer: Answer, pieces: Sequence[Piece]) -> None:
    """Render the output so far, in order: what had been held back for a moment is again."""
    for piece in pieces:
        if piece.headers is not None:
            answer.headers = piece.headers
    for is_keepalive, group in groupby(pieces, lambda piece: piece.keepalive):
        run = list(group)
        answer.at = run[-1].at
        if is_keepalive:
            for _ in run:
                answer.add_keepalive()
        elif any(piece.items for piece in run):
            answer.take([(piece.choice, piece.items) for piece in run if piece.items])


def _flights(
    gateway: GatewayState,
    head: AnswerRecord,
    pieces: Sequence[Piece],
    unfinished: Sequence[int],
    media: Sequence[bytes],
) -> AbstractContextManager[Sequence[Flight]]:
    """Return the context of the flights that continue the answer."""
    output: dict[int, list[Item]] = {choice: [] for choice in unfinished}
    for piece in pieces:
        if piece.choice in output:
            output[piece.choice] += piece.items
    flights = [(head.checkpoints[choice], items) for choice, items in output.items()]
    return gateway.dispatcher.restore(flights, media, max(0.0, time.time() - head.at))


def _renderer(
    gateway: GatewayState,
    answer: Answer,
    head: AnswerRecord,
    described: Described,
    pieces: Sequence[Piece],
    *,
    is_over: bool,
) -> Renderer:
    rendering, model = head.rendering, head.checkpoints[0].model
    if isinstance(rendering, ResponseRendering):
        keep = keeper(gateway, answer.owner, described)
        if is_over and (not head.keeps or gateway.journal.read(store.name(answer.owner, rendering.id))):
            keep = None  # it was done already
        builder = rendering.builder(clock_of(answer), keep)
        if head.background:
            return background.introduce(gateway, answer, rendering, builder, described.before)
        background.register(gateway, (answer.owner, rendering.id), answer, builder)
        return rendering.of(builder)
    if rendering.stream:
        gateway.answers.name(answer, rendering.id, head.stream_of, rendering.created)
    known = next((piece.fingerprint for piece in pieces if piece.fingerprint), "")
    return rendering.renderer(lambda: known or fingerprint(gateway, model))


def _blobs(blob: Blob, digests: Sequence[bytes]) -> list[bytes] | None:
    found = [blob(digest) for digest in digests]
    known = [blob for blob in found if blob is not None]
    return known if len(known) == len(found) else None


def _pieces(blob: Blob, digests: Sequence[bytes], shared: Shared) -> list[StoredItems] | None:
    for digest in digests:
        if digest not in shared:
            data = blob(digest)
            if data is None:
                return None
            shared[digest] = StoredItems(data, digest=digest)
    return [shared[digest] for digest in digests]
