"""The model thread: take commands, plan, carry out, publish. All of MLX happens below `Engine`.

A row's fault ends that row. A step that fails belongs to nobody in particular: its rows fail and the engine
is reset. Several prompts that fail together are run again one by one, so that the one at fault fails alone.
After too many failures without a token in between (`failures`) the thread gives up, so that a supervisor
starts a fresh process.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from protocol.about import about
from protocol.errors import Code, RequestError
from protocol.parts import Delta, Resources, Reuse
from worker.contract import Drawn, Likelihood, Model, Prepared, Step
from worker.schedule import scoring
from worker.schedule.admission import AdmissionWindow
from worker.schedule.answer import Answer
from worker.schedule.commands import Clear, Command, Drop, Fetched, Stop, Submit, Written
from worker.schedule.counters import TOLD_EVERY_S, Counters
from worker.schedule.drafting import Drafting
from worker.schedule.failures import Failures, engine_error
from worker.schedule.publisher import Publisher
from worker.schedule.rows import Chunk, Group, Look, Phase, Row
from worker.schedule.scheduler import Scheduler
from worker.schedule.shown import forget, show
from worker.schedule.sparse import Thinning
from worker.schedule.store import Store

log = logging.getLogger(__name__)

OUTBOX_MESSAGES_MAX = 2048
_BACKPRESSURE_WAIT_S = 0.05


@dataclass(slots=True)
class Loop:
    """One worker's rows."""

    model: Model
    scheduler: Scheduler
    inbox: queue.SimpleQueue[Command]
    publisher: Publisher
    admission: AdmissionWindow = field(default_factory=lambda: AdmissionWindow(0.0))
    store: Store | None = None
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    drafting: Drafting = field(default_factory=Drafting)
    thinning: Thinning = field(default_factory=Thinning)
    device_memory: Callable[[], Resources] = Resources
    _answers: dict[str, Answer] = field(default_factory=dict)
    _failures: Failures = field(default_factory=Failures)
    _told_at: float = -math.inf

    def run(self) -> None:
        """Until `Stop`. Raises `failures.EngineKeepsFailing`."""
        self._count()  # what the model takes is known before anybody asks it
        while self._take_commands():
            if self.publisher.backlog() < OUTBOX_MESSAGES_MAX and len(self.scheduler):
                self._step()

    # --- commands ---

    def _take_commands(self) -> bool:
        """Take all there are; wait for one when there is nothing else to do. False: stop."""
        was_idle = not len(self.scheduler)
        is_clogged = self.publisher.backlog() >= OUTBOX_MESSAGES_MAX
        wait_s = None if was_idle else _BACKPRESSURE_WAIT_S if is_clogged else 0.0
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
            self.scheduler.lap(self.clock(), decoded=None)
        return True

    def _obey(self, command: Command) -> bool:
        match command:
            case Submit(request):
                self._submit(request)
            case Drop(id=None):
                for row in self.scheduler:
                    self._leave(row.id)
            case Drop(id=str() as id):
                self._leave(id)
            case Fetched() | Written() | Clear():
                self._tend_store(command)
            case Stop():
                return False
        self._count()
        return True

    def _tend_store(self, command: Fetched | Written | Clear) -> None:
        match command:
            case Fetched(records) if self.store:
                for id in self.store.fetched(records):
                    self.scheduler.release(id)
            case Written(digest, file_bytes) if self.store:
                self.store.written(digest, file_bytes)
            case Clear(id):
                ram, disk = self.store.clear() if self.store else (0, 0)
                digests, images = self.scheduler.forget_images()
                forget(self.model.engine, digests)
                self.publisher.cleared(id, ram + images, disk)

    def _submit(self, request: Prepared) -> None:
        if self.scheduler.get(request.id) is not None:
            # Its one flight at the gateway hears from the row that is here.
            log.warning("%s: is here already", request.id, extra=about(request.id))
            return
        now = self.clock()
        self.admission.arrived(now, resumed=bool(request.resume))
        try:
            pipeline = self.model.open_pipeline(request)
            wish = self.thinning.wish(request)
            row = self.scheduler.add(request, now, sparse=wish is not None)
            answer = self._answers[request.id] = Answer(row, pipeline, submitted_at=now)
            ended = answer.replay()
        except RequestError as error:
            self.publisher.failed(request.id, error)
        except Exception as error:  # the request boundary: its fault, its failure
            log.exception("%s: no output pipeline", request.id, extra=about(request.id))
            self._fail_row(request.id, engine_error(error))
        else:
            if ended is not None:
                self._finish(request.id, ended)
            elif wish is not None:
                self.thinning.hold(row, wish)
            elif self.store:
                self.store.fetch(row)

    def _leave(self, id: str, *, keeps: bool = True) -> None:
        """The one place where a row is freed."""
        row = self.scheduler.drop(id)
        if self.store and row is not None:
            self.store.drop(id)
            if keeps:
                self.store.keep_ended(row)
        self.model.engine.drop(id)
        self.drafting.drop(id)
        self.thinning.drop(id)
        self._answers.pop(id, None)

    # --- steps ---

    def _step(self) -> None:
        began = self.clock()
        for row in self.scheduler.overdue(began):
            self._fail_row(row.id, RequestError(Code.DEADLINE_EXCEEDED))
        if decodes := self.scheduler.decodes:
            self._decode()
        else:
            self.scheduler.lap(began, decoded=None)
        plan = self.scheduler.plan(self.counters.cache_bytes)
        if self.store:
            self.store.fit(self.scheduler.spare(self.counters.cache_bytes))
        self._count_rows()  # who is stuck in a prefill is known to be running
        for row in plan.preempted:
            log.info("%s: preempted at %d tokens", row.id, row.length, extra=about(row.id))
            self.model.engine.drop(row.id)
        # Prompts that are weighed and those that are run take turns.
        weighs = not plan.look and len(self.thinning) and (not plan.groups or self.counters.steps % 2)
        for group in () if weighs else plan.groups:
            self._prefill(group)
            if not self.inbox.empty():
                break  # a cancel need not wait for the rest, which is planned again
        if plan.look:
            self._look(plan.look)
        elif weighs:
            self._thin(self.scheduler.decode_s if decodes else 0.0)
        if not decodes:
            self.scheduler.lap(self.clock(), decoded=False)
        self.counters.steps += 1
        self._count()

    def _decode(self) -> None:
        rows = self.scheduler.decoding
        try:
            step = self.model.engine.step(self.drafting.propose(rows, self.model.engine.foresee))
        except Exception as error:  # nobody's fault in particular
            self._fail_step(error)
            return
        # A step without tokens has only set out to compute some.
        now = self.clock()
        self.scheduler.lap(now, decoded=True if step.tokens else None)
        for id, tried in self.drafting.learn(step, len(rows), now).items():
            self._answers[id].tried(*tried)
        for id, failure in step.failed.items():
            log.error("%s: grammar failed", id, exc_info=failure, extra=about(id))
            self._fail_row(id, engine_error(failure))
        if step.tokens:
            self._failures.clear()
            self._hand_out(step)

    def _hand_out(self, step: Step) -> None:
        deltas: list[Delta] = []
        ended: list[tuple[str, str, bool]] = []
        likelihoods, now, shape = step.likelihoods, self.clock(), self.model.engine.shape
        for id, token in step.tokens.items():
            answer = self._answers.get(id)
            if answer is None:
                continue
            try:
                run = (Drawn(token, likelihoods.get(id)), *step.further.get(id, ()))
                answer.first_token_at = answer.first_token_at or now
                delta, reason = answer.gain(run, partial(self.scheduler.answered, answer.row))
            except Exception as error:  # the request boundary
                log.exception("%s: output failed", id, extra=about(id))
                self._fail_row(id, engine_error(error))
                continue
            deltas.append(delta)
            if reason is not None:
                ended.append((id, reason, len(delta.tokens) == len(run)))
        if deltas:
            self.publisher.events(deltas)
        for id, reason, is_whole in ended:
            # What was drawn beyond the end is in the states, which nothing takes out again.
            self._finish(id, reason, keeps=is_whole or not (shape and shape.has_states))

    def _look(self, look: Look) -> None:
        """Encode an image. If that fails, the row it was planned for does; others who have it try again."""
        forget(self.model.engine, look.forgotten)
        if self.scheduler.get(look.row.id) is None:
            return  # failed since
        try:
            nbytes = self.model.engine.look(look.picture)
        except Exception as error:  # the request boundary
            log.exception("%s: an image cannot be encoded", look.row.id)
            self._fail_prefill(look.row, error)
        else:
            forget(self.model.engine, self.scheduler.looked(look.row, look.picture, nbytes))

    def _thin(self, decode_s: float) -> None:
        """Read a chunk of a prompt that is to be weighed. If that fails, its request does."""
        row = self.thinning.first
        try:
            if self.thinning.read(row, self.clock, decode_s):
                self.scheduler.release(row.id)
        except Exception as error:  # the request boundary
            log.exception("%s: cannot be weighed", row.id, extra=about(row.id))
            self._fail_row(row.id, engine_error(error))
        self.drafting.interrupt()
        self.scheduler.disturb()

    def _prefill(self, group: Group) -> None:
        now = self.clock()
        self.drafting.interrupt()
        for chunk in group:
            answer = self._answers[chunk.row.id]
            answer.prefill_at = answer.prefill_at or now
        chunks = {chunk.row.id: chunk.tokens for chunk in group if chunk.tokens}
        found: Mapping[str, Sequence[Likelihood]] = {}
        try:
            show(self.model.engine, group)
            if not self._restore(group):
                return  # planned again
            if chunks:
                found = self.model.engine.prefill(chunks, scoring.asked_of(group, self.scheduler.relatives))
        except Exception as error:  # the request boundary
            log.exception("%s: prefill failed", ", ".join(chunks))
            self._retry_apart(group, error)
            self.scheduler.lap(self.clock(), decoded=None)
            return
        self.scheduler.ran(group)
        for chunk in group:
            if chunk.row.id in found or (chunk.last and not chunk.row.is_scored):
                self._tell_scored(chunk.row, found.get(chunk.row.id, ()))
            if self.scheduler.get(chunk.row.id) is None:
                continue
            if self.store:
                self.store.keep(chunk.row, done=chunk.last)
            if chunk.last:
                self._start(chunk)

    def _tell_scored(self, row: Row, likelihoods: Sequence[Likelihood]) -> None:
        """Tell each row of a family what one has found out of their prompt."""
        known = scoring.known_of(row, likelihoods)
        for other in self.scheduler.relatives(row):
            try:
                parts = list(scoring.parts_of(self._answers[other.id], known))
            except Exception as error:  # the request boundary
                log.exception("%s: output failed", other.id, extra=about(other.id))
                self._fail_row(other.id, engine_error(error))
                continue
            other.scored += len(known)
            for first, tokens in parts:
                self.publisher.scored(other.id, first, tokens)

    def _restore(self, group: Group) -> bool:
        """Give rows that begin what is stored of them. False: a stored prefix was forgotten since."""
        for chunk in group:
            match, row = chunk.match, chunk.row
            if match is not None and not (self.store and self.store.restore(row, match)):
                return False
            if row.reuse is None:
                self._tell_reuse(chunk)
        return True

    def _tell_reuse(self, chunk: Chunk) -> None:
        row, match = chunk.row, chunk.match
        miss = match.miss if match else self.scheduler.miss(row)
        tokens, tier = (match.length, match.tier) if match else (0, "none")
        if self.store:
            self.store.count(row, match, miss)
        reuse = Reuse(tokens=tokens, tier=tier, miss=miss, left_out=list(row.left_out))
        # Copies are told with the row that runs for them: what they take from it was computed once.
        for told in (row, *chunk.copies):
            told.reuse = reuse
            self.publisher.reused(told.id, reuse)

    def _retry_apart(self, group: Group, error: Exception) -> None:
        if len(group) == 1:
            self._fail_prefill(group[0].row, error)
            return
        for chunk in group:
            self.model.engine.drop(chunk.row.id)
        for chunk in group:
            self._prefill([self.scheduler.anew(chunk)])

    def _start(self, chunk: Chunk) -> None:
        """Start a row and its copies, which must be made of it before it starts."""
        engine = self.model.engine
        for row in (*chunk.copies, chunk.row):
            if self.scheduler.get(row.id) is None:
                continue  # failed since
            if row.request.max_tokens == 0:
                self._finish(row.id, "length")
                continue
            try:
                if row is not chunk.row:
                    engine.fork(chunk.row.id, row.id)
                engine.start(row.id, row.tokens, len(row.request.tokens), row.request.draw)
            except Exception as error:  # the request boundary
                log.exception("%s: start failed", row.id, extra=about(row.id))
                self._fail_prefill(row, error)
                continue
            self.scheduler.started(row)
            answer = self._answers[row.id]
            answer.decode_at = answer.decode_at or self.clock()
            answer.prefill_at = answer.prefill_at or answer.decode_at

    # --- ends ---

    def _finish(self, id: str, reason: str, *, keeps: bool = True) -> None:
        answer = self._answers[id]
        self._leave(id, keeps=keeps)
        self.publisher.finished(answer, reason, self.clock())

    def _fail_row(self, id: str, error: RequestError) -> None:
        self._leave(id, keeps=False)
        self.publisher.failed(id, error)

    def _fail_step(self, error: Exception) -> None:
        log.error("step failed", exc_info=error)
        for row in self.scheduler:
            if row.phase is Phase.DECODE:
                self._fail_row(row.id, engine_error(error))
        self.model.engine.reset()
        self.scheduler.rewind()
        self.scheduler.lap(self.clock(), decoded=None)
        self._failures.count(error)

    def _fail_prefill(self, row: Row, error: Exception) -> None:
        """The prompt's fault, unless the engine cannot prefill anything else either."""
        self._fail_row(row.id, engine_error(error))
        self._failures.probe(self.model.engine)

    def _count_rows(self) -> None:
        self.counters.running = self.scheduler.count(Phase.PREFILL, Phase.DECODE)
        self.counters.waiting = self.scheduler.count(Phase.WAITING, Phase.AHEAD)

    def _count(self) -> None:
        self._count_rows()
        self.counters.cache_bytes = self.model.engine.cache_bytes()
        now = self.clock()
        if not len(self.scheduler) or now - self._told_at >= TOLD_EVERY_S:
            self._told_at = now
            self.counters.rows = [
                self._answers[row.id].status(now) for row in self.scheduler if row.id in self._answers
            ]
            self.counters.prefix = self.store.status() if self.store else None
            self.counters.device = self.device_memory()
            self.counters.images = self.scheduler.image_status
            self.counters.drafts = self.drafting.status()
