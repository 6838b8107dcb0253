"""Scripted texts for the loop that encodes: tokens say what becomes of them."""

from __future__ import annotations

import queue
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.messages import Encoded, Failed, Finished, Message
from protocol.parts import Capabilities
from worker.contract import EncodingModel, Facts
from worker.schedule.commands import Command, Drop, Encode, Stop
from worker.schedule.encoding import EncodingLoop
from worker.schedule.pace import Pace
from worker.schedule.publisher import Publisher
from worker.texts import PreparedTexts, Text

INCARNATION = "worker-1"
WIDTH = 2
FAILING = 13
"""A token that no pass survives."""


class Broken(Exception):
    """What the script says fails."""


def vector(text: Text) -> bytes:
    """What the scripted model says of a text."""
    return struct.pack("<2f", sum(text.tokens), len(text.tokens))


def prepared(id: str, *lengths: int, first: int = 20, **more: object) -> PreparedTexts:
    """Texts of so many tokens, no two alike."""
    starts = range(first, first + len(lengths))
    texts = [Text(tuple(range(start, start + length))) for start, length in zip(starts, lengths, strict=True)]
    return PreparedTexts(id, tuple(texts), **more)  # type: ignore[arg-type]


@dataclass
class ScriptedEncoder:
    """Keeps the lengths of each batch. `at`: what happens at a call, counted from 0."""

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
    """A loop, its model, and what it has said."""

    def __init__(self, *, tokens_max: int = 64) -> None:
        self.now = 100.0
        self.encoder = ScriptedEncoder()
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.said: list[Message] = []
        self.backlog = 0
        facts = Facts("m", 128, 1, Capabilities(generation=False, embeddings=True))
        self.loop = EncodingLoop(
            model=EncodingModel(facts, self.encoder, lambda: NotImplemented),
            pace=Pace(target_s=0.025, tokens_max=tokens_max),
            inbox=self.inbox,
            publisher=Publisher(INCARNATION, self.said.append, lambda: self.backlog),
            clock=lambda: self.now,
        )

    def submit(self, *requests: PreparedTexts) -> None:
        for request in requests:
            self.inbox.put(Encode(request))

    def cancel(self, id: str | None) -> None:
        self.inbox.put(Drop(id))

    def run(self, steps: int = 1000) -> None:
        """Until nothing is left to do, or for so many steps."""
        self.inbox.put(Drop("nobody"))  # or it would wait for somebody
        while self.loop._take_commands() and len(self.loop._queue) and steps:
            self.loop._step()
            steps -= 1
            self.inbox.put(Drop("nobody"))

    def stop(self) -> None:
        self.inbox.put(Stop())

    def vectors(self, id: str) -> dict[int, bytes]:
        """What was told of a request's texts, by place; each once, and in numbered parts."""
        parts = [message for message in self.said if isinstance(message, Encoded) and message.id == id]
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
