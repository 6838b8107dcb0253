"""Model thread: takes commands, schedules, runs the engine, publishes. MLX is used only below `Engine`.

An error in one row ends that row. A failed decode step is attributed to no row: all its rows fail and the
engine is reset. Prompts that fail in one call are retried one by one, so that only the one at fault fails.
After too many failures without a token in between (`failures`) the thread ends, so that a supervisor starts a
new process. A failure of the GPU, which MLX reports late and to whoever calls next, ends the thread at once.

A progress watchdog restarts a row that makes no progress while the loop runs, without whatever it waited for.
If that does not help, the thread ends as well.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from protocol.common.log_context import about
from protocol.common.progress import ProgressWatch
from protocol.errors import Code, RequestError
from protocol.types import AdapterInfo, Delta, PrefixReuse, Resources
from worker.core.adapter_changes import AdapterChanges
from worker.core.batching_window import BatchingWindow
from worker.core.commands import (
    Abort,
    AddAdapter,
    ClearPrefixes,
    Command,
    DiskSpace,
    Fetched,
    RelieveMemory,
    RemoveAdapter,
    Stop,
    Submit,
    Written,
)
from worker.core.failures import STARVED_S_MAX, Failures, RowStarved, describe, engine_error, watched
from worker.core.memory_relief import Relief
from worker.core.prefix.store import PrefixStore
from worker.core.publisher import (
    TOLD_EVERY_S,
    Counters,
    Publisher,
    gain,
    logprobs_of,
    parts_of,
    replay,
    status_of,
)
from worker.core.row_inputs import asked_of, drop_rows, last_tokens, set_inputs
from worker.core.rows import Chunk, EncodeImage, Group, Phase, Row
from worker.core.scheduler import Scheduler
from worker.core.sparse_prefill import SparsePrefillQueue
from worker.core.speculation import Speculation
from worker.interfaces import Model
from worker.process.device_errors import raise_if_device_failed
from worker.values import NO_DRAFTS, EngineRequest, GuideError, Logprob, SampledToken, StepOutput

log = logging.getLogger(__name__)

OUTBOX_MESSAGES_MAX = 2048
"""Messages that wait for the I/O thread, beyond which no step is run: a minute of a step each 30 ms."""
PAUSE_S = 0.05
"""Poll interval in seconds when there are rows but none can run, or when the outbox is full."""


class RowEnd(NamedTuple):
    """A row that is complete. `is_clean`: its caches hold its answer and nothing else."""

    row: Row
    reason: str
    is_clean: bool = True


@dataclass(slots=True)
class EngineCore:
    """The loop of one worker over its rows."""

    model: Model
    scheduler: Scheduler
    inbox: queue.SimpleQueue[Command]
    publisher: Publisher
    admission: BatchingWindow = field(default_factory=lambda: BatchingWindow(0.0))
    store: PrefixStore | None = None
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    drafting: Speculation = field(default_factory=Speculation)
    sparse_prefill: SparsePrefillQueue = field(default_factory=SparsePrefillQueue)
    device_memory: Callable[[], Resources] = Resources
    watch: ProgressWatch = field(default_factory=lambda: ProgressWatch(STARVED_S_MAX))
    on_adapters: Callable[[Sequence[AdapterInfo]], None] = lambda adapters: None
    context_length: int = 0
    """Both: see `AdapterChanges`."""
    _adapters: AdapterChanges = field(init=False)
    _relief: Relief = Relief.NONE
    _has_worked: bool = True
    """Whether the last step ran something."""
    _failures: Failures = field(default_factory=Failures)
    _published_at: float = -math.inf

    def __post_init__(self) -> None:
        self._adapters = AdapterChanges(
            self.model, self.scheduler, self.publisher, self.context_length, self.on_adapters
        )
        if self.store:
            self.store.spare = partial(self.scheduler.reservations.spare, 0)

    def run(self) -> None:
        """Run until `Stop`. Raises `EngineKeepsFailing`, `RowStarved` and `DeviceError`."""
        self._count()  # report the model's memory before the first request
        while self._take_commands():
            if len(self.scheduler):
                self._turn()
            self._count()

    def _turn(self) -> None:
        self._end_waits(self.clock())
        if self.publisher.backlog() < OUTBOX_MESSAGES_MAX:
            self._has_worked = self._step()
            self.counters.steps += self._has_worked
            self._check_progress(self.clock())

    # --- commands ---

    def _take_commands(self) -> bool:
        """Handle all queued commands; wait for one when idle. Return False on `Stop`."""
        was_idle = not len(self.scheduler)
        is_clogged = self.publisher.backlog() >= OUTBOX_MESSAGES_MAX
        wait_s = None if was_idle else PAUSE_S if is_clogged or not self._has_worked else 0.0
        window_ends: float | None = None
        while True:
            try:
                command = self.inbox.get(block=wait_s != 0.0, timeout=wait_s)
            except queue.Empty:
                break
            if not self._obey(command):
                return False
            wait_s = 0.0
            if was_idle and len(self.scheduler) and not self.scheduler.is_full:
                now = self.clock()
                window_ends = window_ends or now + self.admission.open(now)
                wait_s = max(0.0, window_ends - now)
        if is_clogged:
            self.scheduler.on_step_end(self.clock(), decoded=None)
        return True

    def _obey(self, command: Command) -> bool:
        match command:
            case Submit(request):
                self._submit(request)
            case Abort(id):
                self._leave(id)
            case Fetched() | Written() | DiskSpace():
                if self.store:
                    self.store.obey(command, self.clock())
            case ClearPrefixes(id, namespace):
                ram, disk = self.store.clear(namespace) if self.store else (0, 0)
                images = self.scheduler.forget_images(namespace)
                self.publisher.cleared(id, ram + images, disk, namespace)
            case RelieveMemory(relief):
                self._relieve(relief)
            case AddAdapter() | RemoveAdapter():
                self._adapters.carry_out(command, self._fail_row)
            case Stop():
                return False
        return True

    def _relieve(self, relief: Relief) -> None:
        self._relief = relief
        if self.store:
            self.store.relieve(relief)
        if relief:
            self.scheduler.forget_images()
            self.model.release_memory()

    def _submit(self, request: EngineRequest) -> None:
        if self.scheduler.get(request.id) is not None:
            # The existing row answers the flight at the gateway.
            log.warning("%s: ignored a duplicate request", request.id, extra=about(request.id))
            return
        now = self.clock()
        self.admission.arrived(now, resumed=bool(request.resume))
        try:
            self._adapters.require(request)
            if not request.resume:  # a stream that another worker began goes on
                known = self.store.known_tokens(request) if self._relief and self.store else 0
                self._relief.check_prompt(len(request.tokens) - known)
            output_processor = self.model.open_output_processor(request)
            row = self.scheduler.add(request, now)
            row.output_processor = output_processor
            self.sparse_prefill.hold(row)
            ended = replay(row)
        except RequestError as error:
            self._fail_row(request.id, error)
        except Exception as error:  # the request boundary
            log.exception("%s: the output processor cannot be created", request.id, extra=about(request.id))
            self._fail_row(request.id, engine_error(error))
        else:
            if ended is not None:
                self._finish(RowEnd(row, ended))
            elif self.store:
                self.store.fetch(row, now)

    def _leave(self, id: str, *, is_stored: bool = True) -> None:
        """End a row in the core and the engine: the only place that ends it in both."""
        row = self.scheduler.drop(id)
        if row is not None:
            self._end_row_waits(row)
            if self.store and is_stored:
                self.store.store_ended_row(row)
        self.model.engine.drop(id)

    def _end_row_waits(self, row: Row) -> None:
        self.sparse_prefill.drop(row)
        if self.store:
            self.store.drop(row)

    # --- steps ---

    def _step(self) -> bool:
        """Run what can run now. Return whether that was anything."""
        if decodes := self.scheduler.decodes:
            self._decode()
        else:
            self.scheduler.on_step_end(self.clock(), decoded=None)
        self.counters.cache_bytes = self.model.engine.cache_bytes()
        plan = self.scheduler.plan(self.counters.cache_bytes)
        if self.store:
            spare = self.scheduler.reservations.spare(self.counters.cache_bytes)
            self.store.fit(spare, plan.groups, self.scheduler.decoding)
        self._count_rows()  # a row stuck in prefill is reported as running
        for row in plan.preempted:
            log.info("%s: preempted at %d tokens", row.id, row.length, extra=about(row.id))
            self.model.engine.drop(row.id)
        # Importance scoring and prefill take turns.
        has_turn = not plan.groups or self.counters.steps % 2
        weighs = not plan.to_encode and self.sparse_prefill.rows and has_turn
        for group in () if weighs else plan.groups:
            self._prefill(group)
            if not self.inbox.empty():
                break  # a cancel does not wait for the rest, which is planned again
        if plan.to_encode:
            self._next_image(plan.to_encode)
        elif weighs:
            self._score_chunk(self.scheduler.decode_s if decodes else 0.0)
        if not decodes:
            self.scheduler.on_step_end(self.clock(), decoded=False)
        return bool(decodes or plan.groups or plan.to_encode or plan.preempted or weighs)

    def _end_waits(self, now: float) -> None:
        """Fail rows whose deadline has passed, and release rows that have waited too long for the disk."""
        for row in self.scheduler.overdue(now):
            self._fail_row(row.id, RequestError(Code.DEADLINE_EXCEEDED))
        for row in self.store.overdue(now) if self.store else ():
            log.warning(
                "%s: no reply from the disk prefix cache, computing the prefix", row.id, extra=about(row.id)
            )
            row.is_blocked = False

    def _check_progress(self, now: float) -> None:
        """Restart starved rows."""
        if not self.watch.is_due(now):
            return
        states = map(watched, self.scheduler)
        for id in self.watch.check(states, now, has_room=self.scheduler.has_room(self.counters.cache_bytes)):
            if row := self.scheduler.get(id):
                self._restart(row)

    def _restart(self, row: Row) -> None:
        """End all waits of a starved row and requeue it. Raises `RowStarved` if it was restarted before."""
        log.error("%s: no progress: %s", row.id, describe(row), extra=about(row.id))
        self.counters.starved += 1
        if row.restarts:
            raise RowStarved(f"{row.id} made no progress after it was restarted: {describe(row)}")
        self._end_row_waits(row)
        self.model.engine.drop(row.id)
        self.scheduler.restart(row)

    def _decode(self) -> None:
        rows, drafts = self.scheduler.decoding, NO_DRAFTS
        try:
            if self.drafting.is_on:
                drafts = self.drafting.propose(rows, self.model.engine.forced_tokens)
            step = self.model.engine.step(drafts)
        except Exception as error:  # attributed to no row
            self._fail_step(error)
            return
        # A step without tokens has only started the pipeline.
        now = self.clock()
        self.scheduler.on_step_end(now, decoded=True if step.tokens else None)
        if self.drafting.is_on:
            self.drafting.learn(step, now)
        self._hand_out(step)

    def _hand_out(self, step: StepOutput) -> None:
        for id, failure in step.failed.items():
            level = logging.INFO if isinstance(failure, GuideError) else logging.ERROR
            log.log(level, "%s: grammar failed", id, exc_info=failure, extra=about(id))
            self._fail_row(id, engine_error(failure))
        if step.tokens:
            self._failures.in_a_row = 0
        deltas: list[Delta] = []
        ends: list[RowEnd] = []
        likelihoods, now, shape = step.likelihoods, self.clock(), self.model.engine.shape
        for id, token in step.tokens.items():
            row = self.scheduler.get(id)
            if row is None:
                continue
            try:
                run = (SampledToken(token, likelihoods.get(id)), *step.further.get(id, ()))
                row.first_token_at = row.first_token_at or now
                delta, reason = gain(row, run, partial(self.scheduler.answered, row))
            except Exception as error:  # the request boundary
                log.exception("%s: output failed", id, extra=about(id))
                self._fail_row(id, engine_error(error))
                continue
            deltas.append(delta)
            if reason is not None:
                # Tokens sampled after the end are in the recurrent states, and cannot be removed from them.
                is_clean = len(delta.tokens) == len(run) or not (shape and shape.has_states)
                ends.append(RowEnd(row, reason, is_clean))
        if deltas:
            self.publisher.events(deltas)
        self._finish(*ends)

    def _next_image(self, look: EncodeImage) -> None:
        """Encode an image. If that fails, only the row that it was planned for fails; others try again."""
        if self.scheduler.get(look.row.id) is None:
            return  # the row has failed meanwhile
        try:
            encoded = self.model.engine.encode_image(look.image)
        except Exception as error:  # the request boundary
            log.exception("%s: an image cannot be encoded", look.row.id)
            self._fail_prefill(look.row, error)
        else:
            self.scheduler.on_image_encoded(look, encoded)

    def _score_chunk(self, decode_s: float) -> None:
        """Run a chunk of importance scoring for sparse prefill. If that fails, its request fails."""
        row = self.sparse_prefill.rows[0]
        try:
            if self.sparse_prefill.read(row, self.clock, decode_s):
                row.is_blocked = False
        except Exception as error:  # the request boundary
            log.exception("%s: importance scoring failed", row.id, extra=about(row.id))
            self._fail_row(row.id, engine_error(error))
        self.drafting.interrupt()
        self.scheduler.disturb()

    def _prefill(self, group: Group) -> None:
        now = self.clock()
        self.drafting.interrupt()
        for chunk in group:
            chunk.row.prefill_at = chunk.row.prefill_at or now
        chunks = {chunk.row.id: chunk.tokens for chunk in group if chunk.tokens}
        last = last_tokens(self.model.engine, group, is_stored=bool(self.store))
        found: Mapping[str, Sequence[Logprob]] = {}
        try:
            set_inputs(self.model.engine, group)
            if not self._restore(group):
                return  # will be planned again
            if chunks:
                targets = asked_of(group, self.scheduler.relatives)
                embeddings = self.scheduler.embeddings(group)
                found = self.model.engine.prefill(chunks, targets, last, embeddings)
        except Exception as error:  # the request boundary
            log.exception("%s: prefill failed", ", ".join(chunks))
            self._retry_apart(group, error)
            self.scheduler.on_step_end(self.clock(), decoded=None)
            return
        self.scheduler.ran(group)
        for chunk in group:
            if chunk.row.id in found or (chunk.last and not chunk.row.is_scored):
                self._report_logprobs(chunk.row, found.get(chunk.row.id, ()))
            if self.scheduler.get(chunk.row.id) is None:
                continue
            if self.store:
                self.store.keep(chunk.row, done=chunk.last)
            if chunk.last:
                self._start(chunk)

    def _report_logprobs(self, row: Row, likelihoods: Sequence[Logprob]) -> None:
        """Publish new prompt logprobs of a row to all rows of its family."""
        known = logprobs_of(row, likelihoods)
        for other in self.scheduler.relatives(row):
            try:
                parts = list(parts_of(other, known))
            except Exception as error:  # the request boundary
                log.exception("%s: output failed", other.id, extra=about(other.id))
                self._fail_row(other.id, engine_error(error))
                continue
            other.scored += len(known)
            for first, tokens in parts:
                self.publisher.scored(other.id, first, tokens)

    def _restore(self, group: Group) -> bool:
        """Restore the stored prefixes of a group. Return False if one was evicted meanwhile."""
        for chunk in group:
            match, row = chunk.match, chunk.row
            if match is not None and not (self.store and self.store.restore(row, match)):
                drop_rows(self.model.engine, group)  # those before it were restored
                return False
            if row.reuse is None:
                self._report_reuse(chunk)
        return True

    def _report_reuse(self, chunk: Chunk) -> None:
        row, match = chunk.row, chunk.match
        miss = match.miss if match else self.scheduler.miss(row)
        tokens, tier = (match.length, match.tier) if match else (0, "none")
        if self.store:
            self.store.count(row, match, miss)
        message, role = self.scheduler.missed_message(row, miss)
        spans = list(row.left_out)
        reuse = PrefixReuse(tokens=tokens, tier=tier, miss=miss, message=message, role=role, left_out=spans)
        # Copies report the same reuse as the row that runs for them: their prompt is computed once.
        for told in (row, *chunk.copies):
            told.reuse = reuse
            self.publisher.reused(told.id, reuse)

    def _retry_apart(self, group: Group, error: Exception) -> None:
        raise_if_device_failed(error)
        if len(group) == 1:
            self._fail_prefill(group[0].row, error)
            return
        drop_rows(self.model.engine, group)
        for chunk in group:
            self._prefill([self.scheduler.anew(chunk)])

    def _start(self, chunk: Chunk) -> None:
        """Start a row and its copies, which must be forked from it before it starts."""
        engine = self.model.engine
        for row in (*chunk.copies, chunk.row):
            if self.scheduler.get(row.id) is None:
                continue  # the row has failed meanwhile
            if row.request.max_tokens == 0:
                self._finish(RowEnd(row, "length"))
                continue
            try:
                if row is not chunk.row:
                    engine.fork(chunk.row.id, row.id)
                first = engine.start(row.id, row.tokens, len(row.request.tokens), row.request.sampling)
            except Exception as error:  # the request boundary
                log.exception("%s: start failed", row.id, extra=about(row.id))
                self._fail_prefill(row, error)
                continue
            self.scheduler.started(row, sampled=len(first.tokens))
            row.decode_at = row.decode_at or self.clock()
            row.prefill_at = row.prefill_at or row.decode_at
            self._hand_out(first)

    # --- ends ---

    def _finish(self, *ends: RowEnd) -> None:
        """Publish that rows are complete, then store and free them, for which no client waits."""
        for end in ends:
            self.publisher.finished(end.row, end.reason, self.clock())
        for end in ends:
            self._leave(end.row.id, is_stored=end.is_clean)

    def _fail_row(self, id: str, error: RequestError) -> None:
        self._leave(id, is_stored=False)
        self.publisher.failed(id, error)

    def _fail_step(self, error: Exception) -> None:
        raise_if_device_failed(error)
        log.error("step failed", exc_info=error)
        for row in self.scheduler:
            if row.phase is Phase.DECODE:
                self._fail_row(row.id, engine_error(error))
        self.model.engine.reset()
        self.scheduler.rewind()
        self.scheduler.on_step_end(self.clock(), decoded=None)
        self._failures.count(error)

    def _fail_prefill(self, row: Row, error: Exception) -> None:
        """Fail the row, and count an engine failure if a probe prompt fails as well."""
        self._fail_row(row.id, engine_error(error))
        self._failures.probe(self.model.engine)

    def _count_rows(self) -> None:
        self.counters.running = self.scheduler.count(Phase.PREFILL, Phase.DECODE)
        self.counters.waiting = self.scheduler.count(Phase.WAITING)

    def _count(self) -> None:
        self._count_rows()
        now = self.clock()
        if not len(self.scheduler) or now - self._published_at >= TOLD_EVERY_S:
            self._published_at = now
            self.counters.cache_bytes = self.model.engine.cache_bytes()
            self.counters.rows = [status_of(row, now) for row in self.scheduler]
            self.counters.prefix = self.store.status() if self.store else None
            self.counters.device = self.device_memory()
            self.counters.images = self.scheduler.image_status
            self.counters.drafts = self.drafting.status()
