"""What the journal gets of durable answers: a description of each, and a recorder of its output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from broker.answers.answer import Answer
from broker.answers.record import AnswerRecord, AnswerRecorder
from broker.api.admin.report import version
from broker.api.rendering import Rendering
from broker.api.responses.answer import Document
from broker.api.responses.store import StoredItems, StoredResponse, blobs_of, digest_of
from broker.dispatch.checkpoint import Checkpoint
from broker.state import GatewayState
from protocol.messages import Request


@dataclass(frozen=True, slots=True)
class Described:
    """What the journal needs beside the flights. `before`: the conversation of a response, with its own
    input; `keeps`: it is stored; `conversation`: it extends this one."""

    rendering: Rendering
    before: Sequence[StoredItems] = ()
    keeps: bool = False
    conversation: str | None = None


def fingerprint(gateway: GatewayState, model: str) -> str:
    """Return OpenAI's `system_fingerprint`, which changes with the model's weights and our version."""
    entry = gateway.dispatcher.fleet.models.get(model)
    identity = entry.last.identity if entry and entry.last else ""
    digest = sha256("\n".join((version(), model, identity)).encode()).hexdigest()
    return f"fp_{digest[:10]}"


def keeper(gateway: GatewayState, owner: str, described: Described) -> Callable[[Document], None] | None:
    """Return the function that stores the response and extends its conversation; None if it does neither."""
    store, conversation = gateway.responses, described.conversation
    if not described.keeps and conversation is None:
        return None

    def keep(document: Document) -> None:
        stored = StoredResponse.of(document, tuple(described.before))
        if described.keeps:
            store.put(owner, described.rendering.id, stored)
        if conversation is not None:
            store.extend(owner, conversation, stored.pieces[-2:])

    return keep


def clock_of(answer: Answer | None) -> Callable[[], float]:
    """Return the clock of what is rendered: the time of the latest output, as recorded if it is."""
    return time.time if answer is None else lambda: answer.at or time.time()


def record(
    gateway: GatewayState,
    answer: Answer,
    described: Described,
    requests: Sequence[Request],
    frames: Sequence[bytes],
    model: str,
    *,
    prompts: int = 1,
) -> AnswerRecorder | None:
    """Record an answer in the journal from now on, if there is one. Return its recorder."""
    if not gateway.journal.is_durable:
        return None
    media = {sha256(frame).digest(): frame for frame in frames}
    answer_record = AnswerRecord(
        owned_by=answer.owner,
        key=answer.key,
        digest=answer.digest,
        rendering=described.rendering,
        checkpoints=[Checkpoint(request=request, model=model) for request in requests],
        at=time.time(),
        media=[sha256(frame).digest() for frame in frames],
        before=[digest_of(piece) for piece in described.before],
        keeps=described.keeps,
        conversation=described.conversation,
        stream_of=answer.conversation,
        background=answer.in_background,
        prompts=prompts,
        own_bytes=answer.nbytes,
    )
    recorder = recorder_of(gateway, answer, answer_record, model)
    if answer.in_background:
        gateway.answers.wait_for_disk(answer)
    recorder.begin(media | blobs_of(described.before))
    return recorder


def recorder_of(
    gateway: GatewayState, answer: Answer, answer_record: AnswerRecord, model: str, id: str = ""
) -> AnswerRecorder:
    """Return the recorder of an answer. `id`: of its entry, if the journal has one."""
    known = partial(fingerprint, gateway, model)
    return AnswerRecorder(
        gateway.journal, answer, answer_record, gateway.dispatcher.checkpoint, known, time.time, id
    )
