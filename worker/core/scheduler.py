"""Scheduler with continuous batching and chunked prefill. Plain Python, deterministic: no MLX, no clock.

Measured times are passed in. Each step decodes every started row, then prefills as much as the inter-token
target leaves time for. The order is that of priority, then of arrival. Invariants: a request is in exactly
one phase; at most `rows_max` rows run; reserved memory is at most `bytes_max`; no row takes a place or memory
that an earlier one waits for, unless that one is *held* for older sessions (`sessions`). A preempted row
keeps its place in the queue. Among rows that have a place, short prompts go before a long one in every other
step, so that they wait for one of its chunks only. Lines of batches have the lowest priority, and are
preempted when another row waits for their place or memory.

If the first row in the queue needs an image that is not cached, the step encodes that image and prefills
nothing, so that streams wait for one image at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from protocol.errors import too_long
from protocol.types import ImageStatus
from worker.core.encoder_cache import EncoderCache, images_of
from worker.core.memory_reservations import Reservations
from worker.core.prefill import (
    PrefillCall,
    PrefillCostModel,
    begin_of,
    call_of,
    form_groups,
    leads_of,
    overtaking,
)
from worker.core.prefix.index import DIVERGED, Match, PrefixIndex
from worker.core.prefix.sharing import OFF, Sharing
from worker.core.rows import Chunk, EncodeImage, Group, Phase, Row, SchedulerOutput, row_of
from worker.core.sessions import HELD_S_MAX, SMALL_SHARE, Sessions
from worker.values import NO_EMBEDDINGS, EncodedImage, EngineRequest

BURST_S = 0.25
"""Requests that arrive within this time after the first step of a burst belong to it: sixteen chats take
0.2 s from the first to the last."""
BURST_PROMPT_S_MAX = 5.0
"""Longest prompt in seconds for which those that came with it decode seldom."""
_SETTLING_STEPS = 2
"""Steps after a preemption until the memory of all caches has dropped: the pass in flight holds it."""
_RUNNING = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler. `bytes_max`: memory for KV caches; `image_bytes_max`: memory for encoded
    images, in addition. `row_bytes`: cache bytes of a row by its length. `aside_bytes`: of `bytes_max`, left
    to adapters."""

    rows_max: int
    prefill_tokens: int = 2048
    inter_token_target_s: float = 0.1
    inter_token_s_max: float = 1.0
    bytes_max: int | None = None
    row_bytes: Callable[[int], int] = lambda tokens: 0
    image_bytes_max: int | None = None
    aside_bytes: int = 0


class Scheduler:
    """The scheduler of one worker over its rows."""

    def __init__(self, policy: SchedulerConfig, prefixes: PrefixIndex | None = None) -> None:
        """`prefixes`: index of the prefix cache; None: no prefix is reused."""
        self._policy = policy
        self._sharing = None if prefixes is None else Sharing(prefixes)
        self._pace = PrefillCostModel(
            target_s=policy.inter_token_target_s,
            gap_s_max=policy.inter_token_s_max,
            tokens_max=policy.prefill_tokens,
        )
        self._encoder_cache = EncoderCache(policy.image_bytes_max)
        self._sessions = Sessions()
        self._arrivals = itertools.count()
        self._rows: dict[str, Row] = {}
        self._in: dict[Phase, dict[Row, None]] = {phase: {} for phase in Phase}
        """The rows of each phase, in order."""
        self.reservations = Reservations(policy.bytes_max, policy.row_bytes, policy.aside_bytes)
        self._has_overtaken = False
        """Whether short prompts went before a long one in the last plan."""
        self._settling, self._step_began_at, self._step_ended_at = 0, 0.0, 0.0
        self._burst = 0
        self._burst_began_at: float | None = None
        """End of the first step of burst `_burst`; None before."""
        self._calls: list[PrefillCall] = []
        self._is_disturbed = False

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))

    @property
    def is_full(self) -> bool:
        """Whether one more row would wait for a place."""
        return len(self._rows) >= self._policy.rows_max

    @property
    def decodes(self) -> bool:
        """Whether any row has started."""
        return self.count(Phase.DECODE) > 0

    @property
    def decoding(self) -> list[Row]:
        """The started rows."""
        return list(self._in[Phase.DECODE])

    def count(self, *phases: Phase) -> int:
        """Return the number of rows in `phases`."""
        return sum(len(self._in[phase]) for phase in phases)

    def get(self, id: str) -> Row | None:
        return self._rows.get(id)

    # --- coming and going ---

    def add(self, request: EngineRequest, now: float) -> Row:
        """Add a request to the queue. Raises `RequestError` for one that could never run."""
        if request.id in self._rows:
            raise ValueError(f"row {request.id} exists already")
        row = row_of(request, images_of(request))
        if self.reservations.needs(row.length) > self.reservations.bytes_max:
            tokens_max = self.reservations.tokens_max(row.length)
            raise too_long(tokens_max, row.length, request.source, by_memory=True)
        self._encoder_cache.check(request)
        self.reservations.hold_pixels(row)
        number = next(self._arrivals)
        row.queue_key, row.prompt_group = (request.priority, number), self._prompt_group(row, number)
        row.burst = self._burst_at(now)
        row.session = self._sessions.join(request.session, request.parent_session, now)
        row.submitted_at = now
        self._rows[row.id] = row
        self._in[Phase.WAITING][row] = None
        if self._sharing:
            self._sharing.begin(row)
        if request.deadline_s is not None:
            row.deadline = now + request.deadline_s
        return row

    def drop(self, id: str) -> Row | None:
        """Forget a row, for whatever reason: the only place that ends the core's record of it. Idempotent."""
        row = self._rows.pop(id, None)
        if row is not None:
            del self._in[row.phase][row]
            row.session.count(-1, self._step_ended_at)
            if row.phase in _RUNNING:
                row.session.running -= 1
                row.session.nbytes = self.reservations.needs(row.length)
                row.session.kept_s = self._pace.seconds([PrefillCall(row.length, row.length // 2)])
            self.reservations.release(row)
            self.reservations.pixel_bytes -= row.pixel_bytes
            self.reservations.forget()
        return row

    def overdue(self, now: float) -> list[Row]:
        """Return the rows whose deadline has passed."""
        return [row for row in self._rows.values() if row.deadline <= now]

    def _burst_at(self, now: float) -> int:
        """Return the number of the burst that a request belongs to, which is noticed `now`.

        During a step it may have come at any time since the last one began, which can be longer ago than
        `BURST_S`.
        """
        came_at = self._step_began_at if self._rows else now
        if self._burst_began_at is not None and came_at - self._burst_began_at > BURST_S:
            self._burst, self._burst_began_at = self._burst + 1, None
        return self._burst

    def _prompt_group(self, row: Row, number: int) -> int:
        # A prompt of one token needs no prefill that could be shared.
        if len(row.tokens) > 1:
            for other in self._of(Phase.PREFILL, Phase.WAITING):
                if row.is_twin(other):
                    return other.prompt_group
        return number

    # --- what has happened ---

    def ran(self, group: Group) -> None:
        """Record that the chunks of a group are in their rows' caches."""
        self._calls.append(call_of(group))
        for chunk in group:
            self._encoder_cache.ran(chunk)
            chunk.row.prefilled = chunk.row.beyond(chunk.begin + len(chunk.tokens))

    def anew(self, chunk: Chunk) -> Chunk:
        """Return a chunk from the start of the row to the end of `chunk`, since the row's cache was lost."""
        tokens = chunk.row.tokens[: chunk.begin + len(chunk.tokens)]
        chunk.row.prefilled = 0
        return replace(chunk, tokens=tokens, match=None)

    def on_image_encoded(self, look: EncodeImage, encoded: EncodedImage) -> None:
        """Cache an image that was encoded for a row."""
        self._encoder_cache.add(look.row, look.image, encoded)

    def embeddings(self, group: Group) -> Mapping[str, EncodedImage]:
        """Return the embeddings of the images in a group that is going to run, by digest."""
        found = (self._encoder_cache.embeddings(chunk) for chunk in group if chunk.row.images)
        return next(found, NO_EMBEDDINGS)  # a row with images runs alone

    def forget_images(self, namespace: str = "") -> int:
        """Evict a namespace's images that are not needed now; return the bytes freed."""
        return self._encoder_cache.clear(self._of(Phase.PREFILL), namespace)

    @property
    def image_status(self) -> ImageStatus | None:
        """Status of the encoder cache; None if it has no memory."""
        return self._encoder_cache.status() if self._policy.image_bytes_max != 0 else None

    def started(self, row: Row, *, sampled: int = 0) -> None:
        """Record that a row has joined the decode batch. `sampled`: tokens from the pass of its prompt."""
        row.sampled_early = sampled
        self._move(row, Phase.DECODE)

    def on_step_end(self, now: float, *, decoded: bool | None) -> None:
        """End a lap: all work since the last one is done, a decode step included if `decoded`.

        With running streams a lap is their inter-token time. `decoded` None: nothing is learned from it, nor
        from a lap in which an image was encoded.
        """
        self._pace.rows = self.count(Phase.DECODE)
        if decoded is not None and not self._is_disturbed:
            self._pace.learn(now - self._step_ended_at, decoded=decoded, calls=self._calls)
        self._calls, self._is_disturbed = [], False
        self._step_began_at, self._step_ended_at = self._step_ended_at, now
        if self._burst_began_at is None and decoded is not None:
            self._burst_began_at = now

    def disturb(self) -> None:
        """Exclude the current step from the cost model: it did other work, such as encoding an image."""
        self._is_disturbed = True

    @property
    def decode_s(self) -> float:
        """Estimated seconds of a decode step; 0 if unknown."""
        return self._pace.decode_s

    def answered(self, row: Row, token: int) -> bool:
        """Append a token to the answer. Return False if another would not fit even if the row were alone."""
        row.answered.append(token)
        row.length += 1
        row.restarts = 0
        return row.length < row.reserved_length or self.reservations.reserve(row)

    def miss(self, row: Row) -> str:
        """Return why no more of a row's prompt is reused, as a value of `protocol.types.PrefixReuse.miss`."""
        return OFF if self._sharing is None else self._sharing.miss(row)

    def missed_message(self, row: Row, miss: str) -> tuple[int | None, str]:
        """Return the message that a row's miss is in, as `message` and `role` of `PrefixReuse`."""
        if self._sharing is None or not miss.startswith(DIVERGED):
            return None, ""
        return self._sharing.missed_message(row)

    def relatives(self, row: Row) -> list[Row]:
        """Return the rows of its family that have not started, including itself."""
        return [
            other
            for other in self._of(Phase.PREFILL, Phase.WAITING)
            if other.prompt_group == row.prompt_group
        ]

    def rewind(self) -> None:
        """Restart all prefills, since every cache was lost. Started rows must have been dropped."""
        for row in self._of(Phase.PREFILL):
            row.prefilled = 0

    def has_room(self, cache_bytes: int) -> bool:
        """Return whether the first row in the queue could be admitted now, by places and memory."""
        ready = self._ready()
        running = self.count(*_RUNNING)
        if not ready and any(not row.is_blocked for row in self._in[Phase.WAITING]):
            return False  # they are held
        if not (ready and running):
            return running < self._policy.rows_max
        yielding = self._yielding_to(ready[0])
        running -= len(yielding)
        free = self.reservations.free(cache_bytes) - running * self.reservations.block_bytes
        free += sum(row.bytes for row in yielding)
        return running < self._policy.rows_max and free >= self.reservations.needs(ready[0].length)

    def restart(self, row: Row) -> None:
        """Requeue a starved row without caches and without waits.

        Its entries in all tables are created anew, since one of them may be what is wrong.
        """
        for rows in self._in.values():
            rows.pop(row, None)
        self._rows[row.id], self._in[row.phase][row] = row, None
        self._preempt(row)
        row.prompt_group, row.waits_for, row.never_waits = next(self._arrivals), None, True
        row.is_blocked = False
        row.restarts += 1

    # --- what is next ---

    def plan(self, cache_bytes: int = 0) -> SchedulerOutput:
        """Plan the work before the next decode step. `cache_bytes`: real usage of all caches.

        Which prompts run next: of those that run or can be admitted (`_line`), one for each family, without
        those that wait for a prefix that another one computes (`_heads`); first short ones in every other
        step, then by priority and arrival; as much as the budget allows (`prefill.form_groups`).
        """
        preempted = self._make_room(cache_bytes)
        line = self._line(cache_bytes, preempted)
        if not line or (self.decodes and self._pace.pauses_prefill()):
            return SchedulerOutput(preempted=preempted)
        heads = self._heads(line)
        if look := self._next_image(heads):
            return SchedulerOutput(self._begin(look.row, heads[look.row]), preempted, look)
        # In every other step, so that many short prompts cannot starve a long one.
        short = [] if self._has_overtaken else overtaking(heads)
        self._has_overtaken = bool(short)
        heads = {row: heads[row] for row in (*short, *heads)}
        budget = self._pace.budget(decoding=self.decodes, may_wait=self._may_wait(heads))
        groups = form_groups(line, heads, budget, self._encoder_cache)
        for chunk in itertools.chain.from_iterable(groups):
            self._admit(chunk.row, *chunk.copies)
        return SchedulerOutput(groups, preempted)

    def _line(self, cache_bytes: int, preempted: list[Row]) -> list[Row]:
        """Return the rows in prefill or admissible now, in order.

        A row is admitted only if all running rows can still grow by a block, or it would soon be preempted.
        Held rows are skipped. Rows that give way to an admissible one are preempted.
        """
        admitted: list[Row] = []
        running, block_bytes = self.count(*_RUNNING), self.reservations.block_bytes
        places = self._policy.rows_max - running
        free = self.reservations.free(cache_bytes) - running * block_bytes
        for row in self._ready():
            needed = self.reservations.needs(row.length)
            while (places <= 0 or free < needed) and (yielding := self._yielding_to(row)):
                last = max(yielding, key=_order)
                places, free = places + 1, free + last.bytes + block_bytes
                preempted.append(self._preempt(last))
            is_alone = places == self._policy.rows_max
            if places <= 0 or (free < needed and not is_alone):
                break
            admitted.append(row)
            places, free = places - 1, free - needed - block_bytes
        return sorted([*self._in[Phase.PREFILL], *admitted], key=_order)

    def _ready(self) -> list[Row]:
        """Return the rows that may be admitted, in order."""
        is_idle = not self.count(*_RUNNING)
        kept_bytes = self._sessions.kept_bytes(self._step_ended_at, is_idle=is_idle)
        waiting = (row for row in self._in[Phase.WAITING] if not row.is_blocked)
        return sorted((row for row in waiting if not self._is_held(row, kept_bytes(row.session))), key=_order)

    def _is_held(self, row: Row, kept: int) -> bool:
        """Return whether a row waits for older sessions, which keep `kept` bytes: if there is no room for
        them, for what runs, for the row, and for the prefix that it begins with."""
        needed, limit = self.reservations.needs(row.length), self.reservations.bytes_max
        has_waited = self._step_ended_at - row.submitted_at > HELD_S_MAX
        if not kept or has_waited or needed <= SMALL_SHARE * limit:
            return False
        return self.reservations.reserved + kept + 2 * needed > limit

    def _yielding_to(self, first: Row) -> list[Row]:
        """Return the running rows that are preempted so that `first` is admitted: lines of batches for all
        others."""
        return [] if first.is_batch else [row for row in self._of(*_RUNNING) if row.is_batch]

    def _heads(self, line: list[Row]) -> dict[Row, Match | None]:
        """Return the rows that run for their families, in order, each with the stored prefix to restore."""
        heads = leads_of(line).values()
        begun = [row for row in self._of(Phase.PREFILL) if row.prefilled]
        return self._sharing.ready(heads, begun) if self._sharing else dict.fromkeys(heads)

    def _next_image(self, heads: Mapping[Row, Match | None]) -> EncodeImage | None:
        """Return the image to encode before the first row can run further, if any."""
        first, match = next(iter(heads.items()), (None, None))
        if first is None:
            return None
        begin = begin_of(first, match)
        image = self._encoder_cache.missing(first, begin)
        if image is None or self._encoder_cache.reach(first, begin) > begin:
            return None
        self._is_disturbed = True
        self._encoder_cache.make_room(image.nbytes, [*self._of(Phase.PREFILL), first])
        return EncodeImage(first, image)

    def _begin(self, row: Row, match: Match | None) -> list[Group]:
        """Admit a row whose image is about to be encoded, and restore its stored prefix."""
        self._admit(row)
        return [[Chunk(row, (), last=False, match=match)]] if match or not row.reuse else []

    def _may_wait(self, heads: Mapping[Row, Match | None]) -> bool:
        """Return whether the rows that decode may wait up to the bound of a gap for the next prompts: lines
        of batches for interactive ones, and those that came together for each other's, if not long.

        A decode step of few rows takes nearly as long as one of all, so until all have started, few are run:
        all complete sooner. Streams of a lost worker come together too.
        """
        if not heads:
            return False
        first, match = next(iter(heads.items()))
        begin, decoding = begin_of(first, match), self.decoding
        streams = [row for row in decoding if not row.is_batch]
        if not streams and not first.is_batch:
            return True
        if streams and first.is_batch:
            return False
        next_s = self._pace.seconds([PrefillCall(len(first.tokens) - begin, begin)])
        came_with = {row.burst for row in heads}
        return next_s <= BURST_PROMPT_S_MAX and all(row.burst in came_with for row in streams or decoding)

    def _admit(self, *rows: Row) -> None:
        for row in rows:
            if row.phase is Phase.WAITING:
                self._move(row, Phase.PREFILL)
                self.reservations.reserve(row)

    # --- bytes ---

    def _make_room(self, cache_bytes: int) -> list[Row]:
        """Preempt rows until the reserved memory fits. The last row stays: alone it fits."""
        preempted: list[Row] = []
        reservations = self.reservations
        self._settling = max(0, self._settling - 1)
        # Real usage may exceed what is reserved, and drops a step or two after a preemption.
        surprised = cache_bytes > reservations.bytes_max and not self._settling
        if surprised:
            reservations.learn(cache_bytes)
        while self.count(*_RUNNING) > 1 and (reservations.reserved > reservations.bytes_max or surprised):
            preempted.append(self._preempt(max(self._of(*_RUNNING), key=_preemption_order)))
            self._settling, surprised = 1 + _SETTLING_STEPS, False
        return preempted

    def _preempt(self, row: Row) -> Row:
        """Preempt a row: it keeps its answer and its place in the queue. Its cache is dropped without being
        stored, since the memory is wanted now; what was stored of it while it ran is found again."""
        self._move(row, Phase.WAITING)
        self.reservations.release(row)
        row.prefilled = 0
        row.preemptions += 1
        if row.answered:
            row.tokens = (*row.request.tokens, *row.answered)
            row.prompt_group, row.digest = next(self._arrivals), hash(row.tokens)
        row.seen, row.common = None, {}
        return row

    def _of(self, *phases: Phase) -> list[Row]:
        return [row for phase in phases for row in self._in[phase]]

    def _move(self, row: Row, phase: Phase) -> None:
        del self._in[row.phase][row]
        row.session.running += (phase in _RUNNING) - (row.phase in _RUNNING)
        row.phase = phase
        self._in[phase][row] = None


def _order(row: Row) -> tuple[int, int]:
    return row.queue_key


def _preemption_order(row: Row) -> tuple[bool, tuple[int, int]]:
    """Return the sort key of preemption; the highest is preempted first."""
    return row.is_batch, row.queue_key
