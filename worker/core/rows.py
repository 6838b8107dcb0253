"""Requests in the core, and the scheduler's output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.types import BATCH_PRIORITY, PrefixReuse
from worker.core.drafts import RowDrafts
from worker.core.prefix.index import Match
from worker.core.prefix.tree import Item
from worker.core.sessions import Session
from worker.interfaces import OutputProcessor
from worker.values import EngineRequest, ImageInput

CHUNK_TOKENS_MIN = 16
"""Minimum chunk of a prefill: run at any cost, so that prompts make progress."""

Span = tuple[int, int]
"""Half-open range of positions."""


class Phase(StrEnum):
    """Phase of a request. Phases only advance, except that a preempted row waits again."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Row:
    """A request in the core: the one record of it. Times are those of the loop's clock."""

    request: EngineRequest

    # --- the queue ---
    queue_key: tuple[int, int] = (0, 0)
    """Its priority and arrival number."""
    phase: Phase = Phase.WAITING
    burst: int = 0
    """Number of its burst: requests that came together."""
    session: Session = field(default_factory=lambda: Session(0))
    deadline: float = math.inf
    is_blocked: bool = False
    """It waits for a prefix from disk or for importance scoring."""
    preemptions: int = 0

    # --- the prompt ---
    tokens: tuple[int, ...] = ()
    """What runs before it decodes: the prompt and, after a preemption, the answer so far."""
    digest: int = 0
    """Hash of `tokens`."""
    prompt_group: int = 0
    """Rows of one group have the same prompt and salt, and one of them runs it for all."""
    prefilled: int = 0
    """Number of `tokens` in its caches, or skipped."""
    scored: int = 0
    """Number of prompt tokens whose logprobs are known or not requested."""
    left_out: tuple[Span, ...] = ()
    """Spans of its prompt that are skipped."""

    # --- the prefix cache ---
    is_private: bool = False
    """Its prefix is neither restored nor stored nor shared."""
    reuse: PrefixReuse | None = None
    """What was restored when it first ran."""
    stored_upto: int = 0
    """Length up to which its prefix is stored."""
    stored: Item | None = None
    """The last item that was stored of it."""
    snapshot_positions: list[int] = field(default_factory=list)
    """Positions, in order, at which it must be stored."""
    seen: tuple[int, Match] | None = None
    """The stored prefix that was found, and the version of the index then."""
    common: dict[int, int] = field(default_factory=dict)
    """Length of the common prefix with the tokens of other rows, by their digest."""
    awaited: set[str] = field(default_factory=set)
    """Digests of the blocks from disk that it waits for."""
    awaited_since: float = 0.0
    waits_for: str | None = None
    """The row whose prefix it waits for."""

    # --- images ---
    images: tuple[ImageInput, ...] = ()
    """Its images, in order."""
    images_counted_upto: int = 0
    """Position up to which they were counted as hits or misses."""
    encoded_for_row: set[str] = field(default_factory=set)
    """Digests of images encoded for it and not used since."""

    # --- memory ---
    length: int = 0
    """Tokens of prompt and answer."""
    reserved_length: int = 0
    """The length for which it has reserved `bytes`."""
    bytes: int = 0

    # --- the answer ---
    output_processor: OutputProcessor | None = None
    answered: list[int] = field(default_factory=list)
    sampled_early: int = 0
    """Tokens sampled with the end of its prompt, 0 or 1."""
    sequence: int = 0
    """Number of deltas published."""
    drafts: RowDrafts | None = None
    """What drafts were worth; None until some may be verified."""
    accepted: int = 0
    """Draft tokens that were accepted; `rejected`: those that were not."""
    rejected: int = 0
    submitted_at: float = 0.0
    prefill_at: float | None = None
    first_token_at: float | None = None
    decode_at: float | None = None

    # --- the progress watchdog ---
    scoring_passes: int = 0
    """Passes of importance scoring while it was blocked."""
    never_waits: bool = False
    """It waits for no other row's prefix any more."""
    restarts: int = 0
    """Restarts since its last token."""

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


def row_of(request: EngineRequest, images: tuple[ImageInput, ...] = ()) -> Row:
    """Return a request as a row, without its place in the queue."""
    tokens = request.tokens + request.resume  # the same tuple if nothing was answered
    asks = request.echo and request.sampling.logprobs is not None
    return Row(
        request=request,
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
