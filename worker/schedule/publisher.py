"""What the gateway hears from the model thread: every message in the name of its incarnation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import RequestError
from protocol.messages import CacheCleared, Encoded, Events, Finished, Message, Reused, Scored, failed
from protocol.parts import Delta, PromptToken, Reuse, Timings, Usage
from worker.schedule.answer import Answer


@dataclass(frozen=True, slots=True)
class Publisher:
    """`publish` hands a message to the I/O thread, `backlog` says how many it holds."""

    incarnation: str
    publish: Callable[[Message], None]
    backlog: Callable[[], int]

    def reused(self, id: str, reuse: Reuse) -> None:
        """How much of its prompt a request did not have to compute."""
        self.publish(Reused(incarnation=self.incarnation, id=id, reuse=reuse))

    def scored(self, id: str, first: int, tokens: list[PromptToken]) -> None:
        """How likely a part of a prompt is, from token number `first` on."""
        self.publish(Scored(incarnation=self.incarnation, id=id, first=first, tokens=tokens))

    def events(self, deltas: list[Delta]) -> None:
        """What one step has brought."""
        self.publish(Events(incarnation=self.incarnation, deltas=deltas))

    def encoded(self, id: str, sequence: int, places: list[int], vectors: bytes) -> None:
        """The vectors of some of a request's texts."""
        self.publish(
            Encoded(incarnation=self.incarnation, id=id, sequence=sequence, places=places, vectors=vectors)
        )

    def encoded_all(self, id: str, usage: Usage, timings: Timings) -> None:
        """A request's texts have their vectors."""
        self.publish(
            Finished(incarnation=self.incarnation, id=id, reason="stop", usage=usage, timings=timings)
        )

    def finished(self, answer: Answer, reason: str, now: float) -> None:
        """An answer is whole."""
        self.publish(
            Finished(
                incarnation=self.incarnation,
                id=answer.row.id,
                reason=reason,
                usage=answer.usage(),
                timings=answer.timings(now),
                stop=answer.pipeline.stop_string,
            )
        )

    def failed(self, id: str, error: RequestError) -> None:
        """A request has ended otherwise."""
        self.publish(failed(self.incarnation, id, error))

    def cleared(self, id: str, ram_bytes: int, disk_bytes: int) -> None:
        """So much was given back by the `Clear` of this id."""
        self.publish(
            CacheCleared(incarnation=self.incarnation, id=id, ram_bytes=ram_bytes, disk_bytes=disk_bytes)
        )
