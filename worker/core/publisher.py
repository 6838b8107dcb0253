"""What the model thread reports: messages to the gateway, and the counters of the heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.errors import RequestError
from protocol.messages import (
    AdaptersChanged,
    CacheCleared,
    EmbeddingChunk,
    Finished,
    Message,
    PrefixHit,
    PromptLogprobs,
    StepOutputs,
    failed,
)
from protocol.types import (
    AdapterInfo,
    Delta,
    ImageStatus,
    PrefixReuse,
    PrefixStatus,
    PromptToken,
    RequestStatus,
    Resources,
    SpecDecodeStatus,
    Timings,
    Usage,
)
from worker.core.request_output import processor_of, timings_of, usage_of
from worker.core.rows import Row

TOLD_EVERY_S = 0.2
"""Interval in seconds at which the status of each row is refreshed."""


@dataclass(slots=True)
class Counters:
    """Counters that the model thread writes and the heartbeat reads. Values are replaced whole: no lock."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    """Number of steps that ran something."""
    starved: int = 0
    """Number of times a row made no progress."""
    cache_bytes: int = 0
    rows: list[RequestStatus] = field(default_factory=list)
    prefix: PrefixStatus | None = None
    device: Resources = field(default_factory=Resources)
    images: ImageStatus | None = None
    drafts: SpecDecodeStatus | None = None


@dataclass(frozen=True, slots=True)
class Publisher:
    """Publisher of one worker. `publish` passes a message to the I/O thread; `backlog` counts its queue."""

    incarnation: str
    publish: Callable[[Message], None]
    backlog: Callable[[], int]

    def reused(self, id: str, reuse: PrefixReuse) -> None:
        """Publish how much of a request's prompt was reused."""
        self.publish(PrefixHit(incarnation=self.incarnation, id=id, reuse=reuse))

    def scored(self, id: str, first: int, tokens: list[PromptToken]) -> None:
        """Publish prompt logprobs, from token index `first` on."""
        self.publish(PromptLogprobs(incarnation=self.incarnation, id=id, first=first, tokens=tokens))

    def events(self, deltas: list[Delta]) -> None:
        """Publish the output deltas of a step."""
        self.publish(StepOutputs(incarnation=self.incarnation, deltas=deltas))

    def encoded(self, id: str, sequence: int, places: list[int], vectors: bytes) -> None:
        """Publish the vectors of some of a request's texts."""
        self.publish(
            EmbeddingChunk(
                incarnation=self.incarnation, id=id, sequence=sequence, places=places, vectors=vectors
            )
        )

    def encoded_all(self, id: str, usage: Usage, timings: Timings) -> None:
        """Publish that all texts of a request are encoded."""
        self.publish(
            Finished(incarnation=self.incarnation, id=id, reason="stop", usage=usage, timings=timings)
        )

    def finished(self, row: Row, reason: str, now: float) -> None:
        """Publish that an answer is complete."""
        self.publish(
            Finished(
                incarnation=self.incarnation,
                id=row.id,
                reason=reason,
                usage=usage_of(row),
                timings=timings_of(row, now),
                stop=processor_of(row).stop_string,
            )
        )

    def failed(self, id: str, error: RequestError) -> None:
        """Publish that a request failed."""
        self.publish(failed(self.incarnation, id, error))

    def adapters_changed(self, name: str, error: str, adapters: Sequence[AdapterInfo]) -> None:
        """Publish that an adapter was loaded or removed, or why not, and all that there are."""
        self.publish(
            AdaptersChanged(incarnation=self.incarnation, name=name, error=error, adapters=list(adapters))
        )

    def cleared(self, id: str, ram_bytes: int, disk_bytes: int, namespace: str = "") -> None:
        """Publish the bytes freed by the cache clear with this id."""
        self.publish(
            CacheCleared(
                incarnation=self.incarnation,
                id=id,
                ram_bytes=ram_bytes,
                disk_bytes=disk_bytes,
                namespace=namespace,
            )
        )
