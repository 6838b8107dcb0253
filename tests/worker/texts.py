"""Scripted texts for the embedding loop: a text's tokens determine its result."""

from __future__ import annotations

import queue
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.messages import EmbeddingChunk, Failed, Finished, Message
from protocol.types import Capabilities
from worker.core.commands import Abort, Command, Stop, SubmitTexts
from worker.core.embedding_core import EmbeddingCore
from worker.core.prefill import PrefillCostModel
from worker.core.publisher import Publisher
from worker.interfaces import EmbeddingModel
from worker.values import ModelInfo, PreparedTexts, Text

INCARNATION = "worker-1"
WIDTH = 2
FAILING = 13
"""Token with which every pass fails."""


class Broken(Exception):
    """Scripted failure."""


def vector(text: Text) -> bytes:
    """Return the scripted model's vector for a text."""
    return struct.pack("<2f", sum(text.tokens), len(text.tokens))


def prepared_texts(id: str, *lengths: int, first: int = 20, **more: object) -> PreparedTexts:
    """Return a request of distinct texts with these numbers of tokens."""
    starts = range(first, first + len(lengths))
    texts = [Text(tuple(range(start, start + length))) for start, length in zip(starts, lengths, strict=True)]
    return PreparedTexts(id, tuple(texts), **more)  # type: ignore[arg-type]


@dataclass
class ScriptedEncoder:
    """Records the lengths of each batch. `at`: actions by index of the call, counted from 0."""

    batches: list[list[int]] = field(default_factory=list)
    at: dict[int, Callable[[], None]] = field(default_factory=dict)
    broken: bool = False

    def encode(self, texts: Sequence[Text]) -> list[bytes]:
        self.batches.append([len(text.tokens) for text in texts])
        self.at.get(len(self.batches) - 1, lambda: None)()
        if self.broken or any(FAILING in text.tokens for text in texts):
            raise Broken("scripted")
        return [vector(text) for text in texts]


class House:
    """A loop, its scripted model, and the messages that it sent."""

    def __init__(self, *, tokens_max: int = 64) -> None:
        self.now = 100.0
        self.encoder = ScriptedEncoder()
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.said: list[Message] = []
        self.backlog = 0
        facts = ModelInfo("m", 128, 1, Capabilities(generation=False, embeddings=True))
        self.loop = EmbeddingCore(
            model=EmbeddingModel(facts, self.encoder, lambda: NotImplemented),
            pace=PrefillCostModel(target_s=0.025, tokens_max=tokens_max),
            inbox=self.inbox,
            publisher=Publisher(INCARNATION, self.said.append, lambda: self.backlog),
            clock=lambda: self.now,
        )

    def submit(self, *requests: PreparedTexts) -> None:
        for request in requests:
            self.inbox.put(SubmitTexts(request))

    def cancel(self, id: str) -> None:
        self.inbox.put(Abort(id))

    def run(self, steps: int = 1000) -> None:
        """Run until no work is left, or for `steps` steps."""
        self.inbox.put(Abort("nobody"))  # the last get() would wait forever without it
        while self.loop._take_commands() and len(self.loop._queue) and steps:
            self.loop._step()
            steps -= 1
            self.inbox.put(Abort("nobody"))

    def stop(self) -> None:
        self.inbox.put(Stop())

    def vectors(self, id: str) -> dict[int, bytes]:
        """Return a request's vectors by index. Checks that each came once, in numbered parts."""
        parts = [message for message in self.said if isinstance(message, EmbeddingChunk) and message.id == id]
        assert [part.sequence for part in parts] == list(range(len(parts)))
        found: dict[int, bytes] = {}
        for part in parts:
            size = len(part.vectors) // len(part.places)
            for number, place in enumerate(part.places):
                assert place not in found
                found[place] = part.vectors[number * size : (number + 1) * size]
        return found

    def end(self, id: str) -> Finished | Failed | None:
        ends = [m for m in self.said if isinstance(m, Finished | Failed) and m.id == id]
        assert len(ends) <= 1
        return ends[0] if ends else None
