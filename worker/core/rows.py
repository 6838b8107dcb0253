"""Rows of the scheduler, and its output. Plain values; only the scheduler changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.types import BATCH_PRIORITY, PrefixReuse
from worker.core.prefill_cost import PrefillCall
from worker.core.prefix.matching import Match
from worker.values import EngineRequest, ImageInput

Span = tuple[int, int]
"""Half-open range of positions."""


class Phase(StrEnum):
    """Phase of a request. Phases only advance, except that a preempted row waits again.

    `PREFILLED`, optional: its prompt was prefilled along with those of others, but the row is not admitted
    yet.
    """

    WAITING = "waiting"
    PREFILLED = "prefilled"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Row:
    """A request in the scheduler, and its progress.

    `queue_key`: its priority and arrival number. `tokens`: what runs before it decodes, the prompt and, after
    a preemption, the answer so far; `prefilled` of them are in its cache. `length`: tokens of prompt and
    answer. `prompt_group`: rows of one group have the same prompt and salt, and one of them runs it for all.
    `reserved_length`: the length for which it has reserved `bytes`. `stored_upto`: the length up to which its
    prefix is stored. `snapshot_positions`: positions, in order, at which it must be stored. `is_blocked`: it
    waits for a prefix from disk or for importance scoring. `reuse`: what was restored when it first ran.
    `scored`: number of prompt tokens whose logprobs are known or not requested. `preemptions`: their number.
    `images`: its images, in order; `images_counted_upto`: the position up to which they were counted;
    `encoded_for_row`: digests of images encoded for it and not used since. `is_private`: its prefix is
    neither restored nor stored nor shared. `left_out`: spans of its prompt that are skipped. `burst`: see
    `Bursts`. `sampled_early`: tokens sampled with the end of its prompt, 0 or 1.

    For the progress watchdog: `blocks_awaited` from disk; `scoring_passes`, passes of importance scoring
    while it was blocked; `waits_for`, the row whose prefix it waits for (`never_waits`: disabled); `restarts`
    since its last token.
    """

    request: EngineRequest
    queue_key: tuple[int, int]
    prompt_group: int
    digest: int
    tokens: tuple[int, ...]
    length: int
    phase: Phase = Phase.WAITING
    prefilled: int = 0
    answered: list[int] = field(default_factory=list)
    bytes: int = 0
    reserved_length: int = 0
    stored_upto: int = 0
    snapshot_positions: list[int] = field(default_factory=list)
    is_blocked: bool = False
    reuse: PrefixReuse | None = None
    scored: int = 0
    preemptions: int = 0
    images: tuple[ImageInput, ...] = ()
    images_counted_upto: int = 0
    encoded_for_row: set[str] = field(default_factory=set)
    is_private: bool = False
    left_out: tuple[Span, ...] = ()
    burst: int = 0
    sampled_early: int = 0
    blocks_awaited: int = 0
    scoring_passes: int = 0
    waits_for: str | None = None
    never_waits: bool = False
    restarts: int = 0

    @property
    def is_batch(self) -> bool:
        """Whether it is a line of a batch."""
        return self.request.priority >= BATCH_PRIORITY

    @property
    def pixel_bytes(self) -> int:
        """Bytes of its images as they were decoded."""
        return sum(image.input_bytes for image in self.images)

    @property
    def has_decoded(self) -> bool:
        """Whether decode steps have added tokens since it started."""
        return self.length > len(self.tokens) + self.sampled_early

    @property
    def is_scored(self) -> bool:
        """Whether all requested logprobs of its prompt are known."""
        return self.scored >= len(self.request.tokens)

    @property
    def reusable(self) -> int:
        """Maximum number of tokens that may be restored: all but the last.

        If prompt logprobs are missing, fewer: each one needs the token before it to run.
        """
        if self.is_private:
            return 0
        return len(self.tokens) - 1 if self.is_scored else max(self.scored - 1, 0)

    @property
    def id(self) -> str:
        return self.request.id

    def is_twin(self, other: Row) -> bool:
        """Return whether one row may run the prompt of both. Prompt logprobs are published to both, so both
        must lack the same ones."""
        return (
            (self.digest, self.request.salt, self.scored) == (other.digest, other.request.salt, other.scored)
            and not (self.is_private or other.is_private)
            and self.tokens == other.tokens
        )

    def cuts_behind(self, position: int) -> list[int]:
        """Return the positions behind `position` at which a chunk must end, if it gets there."""
        return [cut for cut in self.snapshot_positions if cut > position]

    def beyond(self, position: int) -> int:
        """Return the position at which the row goes on after `position`, past a skipped span there."""
        return next((last for first, last in self.left_out if first == position), position)

    def gap(self, position: int) -> int:
        """Return the number of tokens skipped just before a position."""
        return next((last - first for first, last in self.left_out if last == position), 0)


def row_of(request: EngineRequest, images: tuple[ImageInput, ...]) -> Row:
    """Return a request as a row, without its place in the queue."""
    tokens = request.tokens + request.resume  # the same tuple if nothing was answered
    asks = request.echo and request.sampling.logprobs is not None
    return Row(
        request=request,
        queue_key=(0, 0),
        prompt_group=0,
        digest=hash(tokens),
        tokens=tokens,
        length=len(tokens),
        answered=list(request.resume),
        scored=request.scored if asks else len(request.tokens),
        images=images,
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of one row's prefill.

    `last`: the row starts to decode after it, and so do its `copies`. `match`: a stored prefix that is
    restored first; `tokens` come after it. A chunk up to the end that is not `last`: the row is not admitted.
    """

    row: Row
    tokens: tuple[int, ...]
    last: bool
    copies: tuple[Row, ...] = ()
    match: Match | None = None

    @property
    def begin(self) -> int:
        """Position of its first token; valid before it has run."""
        return self.row.prefilled if self.match is None else self.match.length


Group = Sequence[Chunk]
"""Chunks that run in one call. Several start at one position."""


@dataclass(frozen=True, slots=True)
class EncodeImage:
    """An image to be encoded before `row` can run further."""

    row: Row
    image: ImageInput


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Work after a decode step: drop the caches of the `preempted` rows, then run the groups in order.

    With `to_encode`, groups have no tokens to run: they only begin the row whose image is encoded.
    """

    groups: Sequence[Group] = ()
    preempted: Sequence[Row] = ()
    to_encode: EncodeImage | None = None


def call_of(group: Group) -> PrefillCall:
    """Return the call that runs a group, padding included. Valid only before the group has run."""
    return PrefillCall(len(group) * max(len(chunk.tokens) for chunk in group), group[0].begin)
