"""The model thread: take commands, plan, carry out, publish. All of MLX happens below `Engine`.

A row's fault ends that row. A step that fails belongs to nobody in particular: its rows fail and the engine
is reset. After `FAILURES_MAX` failures without a decode step that works in between the thread gives up, so
that a supervisor starts a fresh process.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import Code
from protocol.messages import Delta, Events, Failed, Finished, Message, Timings, Usage
from worker.contract import Model, Pipeline, Prepared
from worker.scheduler import Chunk, Phase, Scheduler

log = logging.getLogger(__name__)

FAILURES_MAX = 10
OUTBOX_MESSAGES_MAX = 2048
_BACKPRESSURE_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class Submit:
    """A prepared request joins the queue."""

    request: Prepared


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits for this request any more; None: for none of them."""

    id: str | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = Submit | Drop | Stop


@dataclass(slots=True)
class Progress:
    """What the loop keeps of one request besides its place in the scheduler."""

    pipeline: Pipeline
    submitted_at: float
    prefill_at: float | None = None
    decode_at: float | None = None
    sequence: int = 0
    tokens: int = 0

    def timings(self, now: float) -> Timings:
        prefill_at = self.prefill_at or now
        decode_at = self.decode_at or now
        return Timings(
            queued_s=prefill_at - self.submitted_at,
            prefill_s=decode_at - prefill_at,
            decode_s=now - decode_at,
        )


@dataclass(slots=True)
class Counters:
    """Written by the model thread, read by the heartbeat: plain integers, no lock needed."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    cache_bytes: int = 0


class EngineKeepsFailing(Exception):
    """The engine failed too many times in a row; a fresh process is the cure."""


@dataclass(slots=True)
class Loop:
    """One worker's rows. `publish` hands a message to the I/O thread, `backlog` says how many it holds."""

    model: Model
    scheduler: Scheduler
    incarnation: str
    inbox: queue.SimpleQueue[Command]
    publish: Callable[[Message], None]
    backlog: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    _progress: dict[str, Progress] = field(default_factory=dict)
    _failures: int = 0

    def run(self) -> None:
        """Until `Stop`. Raises `EngineKeepsFailing`."""
        while self._take_commands():
            if self.backlog() < OUTBOX_MESSAGES_MAX:
                self._step()

    # --- commands ---

    def _take_commands(self) -> bool:
        """Take all there are; wait for one when there is nothing else to do. False: stop."""
        wait_s = None if not len(self.scheduler) else 0.0
        if len(self.scheduler) and self.backlog() >= OUTBOX_MESSAGES_MAX:
            wait_s = _BACKPRESSURE_WAIT_S
        while True:
            try:
                command = self.inbox.get(block=wait_s != 0.0, timeout=wait_s)
            except queue.Empty:
                return True
            wait_s = 0.0
            if not self._obey(command):
                return False

    def _obey(self, command: Command) -> bool:
        match command:
            case Submit(request):
                self._submit(request)
            case Drop(id=None):
                for row in self.scheduler:
                    self._leave(row.request.id)
            case Drop(id=str() as id):
                self._leave(id)
            case Stop():
                return False
        self._count()
        return True

    def _submit(self, request: Prepared) -> None:
        try:
            pipeline = self.model.open_pipeline(request)
        except Exception as error:  # the request boundary: its fault, its failure
            log.exception("%s: no output pipeline", request.id)
            self._publish_failure(request.id, error)
            return
        self.scheduler.add(request)
        self._progress[request.id] = Progress(pipeline, submitted_at=self.clock())

    def _leave(self, id: str) -> Progress | None:
        """The one place where a row is freed."""
        self.scheduler.drop(id)
        self.model.engine.drop(id)
        return self._progress.pop(id, None)

    # --- steps ---

    def _step(self) -> None:
        plan = self.scheduler.plan()
        if not plan:
            return
        # The chunks were cut for caches that a failed step has lost: the next plan cuts them anew.
        if not plan.decode or self._decode():
            for chunk in plan.chunks:
                self._prefill(chunk)
        self._count()
        self.counters.steps += 1

    def _decode(self) -> bool:
        """Whether the step worked."""
        try:
            tokens = self.model.engine.step()
        except Exception as error:  # nobody's fault in particular
            self._fail_step(error)
            return False
        self._failures = 0
        deltas: list[Delta] = []
        ended: list[tuple[str, str]] = []
        for id, token in tokens.items():
            self._gain(id, token, deltas, ended)
        if deltas:
            self.publish(Events(incarnation=self.incarnation, deltas=deltas))
        for id, reason in ended:
            self._finish(id, reason)
        return True

    def _gain(self, id: str, token: int, deltas: list[Delta], ended: list[tuple[str, str]]) -> None:
        row, progress = self.scheduler.get(id), self._progress.get(id)
        if row is None or progress is None:
            return
        progress.tokens += 1
        try:
            text, reason = _advance(row.request, progress, token)
        except Exception as error:  # the request boundary
            log.exception("%s: output failed", id)
            self._fail_row(id, error)
            return
        deltas.append(Delta(id=id, sequence=progress.sequence, tokens=[token], text=text))
        progress.sequence += 1
        if reason is not None:
            ended.append((id, reason))

    def _prefill(self, chunk: Chunk) -> None:
        request, progress = chunk.row.request, self._progress[chunk.row.request.id]
        if progress.prefill_at is None:
            progress.prefill_at = self.clock()
        try:
            if chunk.tokens:
                self.model.engine.prefill(request.id, chunk.tokens)
            if chunk.last:
                self.model.engine.start(request.id, request.tokens[-1], len(request.tokens), request.draw)
        except Exception as error:  # the request boundary: a prompt is run alone
            log.exception("%s: prefill failed", request.id)
            self._fail_row(request.id, error)
            self._count_failure(error)
            return
        self.scheduler.ran(chunk)
        if chunk.last:
            progress.decode_at = self.clock()

    # --- ends ---

    def _finish(self, id: str, reason: str) -> None:
        row = self.scheduler.get(id)
        progress = self._leave(id)
        if row is None or progress is None:
            return
        usage = Usage(prompt_tokens=len(row.request.tokens), completion_tokens=progress.tokens)
        timings = progress.timings(self.clock())
        self.publish(
            Finished(incarnation=self.incarnation, id=id, reason=reason, usage=usage, timings=timings)
        )

    def _fail_row(self, id: str, error: Exception) -> None:
        self._leave(id)
        self._publish_failure(id, error)

    def _publish_failure(self, id: str, error: Exception) -> None:
        message = f"The model failed on this request ({type(error).__name__})."
        self.publish(Failed(incarnation=self.incarnation, id=id, code=Code.ENGINE_ERROR, message=message))

    def _fail_step(self, error: Exception) -> None:
        log.error("step failed", exc_info=error)
        for row in self.scheduler:
            if row.phase is Phase.DECODE:
                self._fail_row(row.request.id, error)
        self.model.engine.reset()
        self.scheduler.rewind()
        self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            raise EngineKeepsFailing(f"{self._failures} failures in a row, the last {error!r}")

    def _count(self) -> None:
        self.counters.running = self.scheduler.count(Phase.PREFILL, Phase.DECODE)
        self.counters.waiting = self.scheduler.count(Phase.WAITING)
        self.counters.cache_bytes = self.model.engine.cache_bytes()


def _advance(request: Prepared, progress: Progress, token: int) -> tuple[str, str | None]:
    """The text a token brings and, where it is the last one, why."""
    if token in request.end_tokens:
        return progress.pipeline.flush(), "stop"
    text = progress.pipeline.push(token)
    if progress.pipeline.stopped:
        return text, "stop"
    if progress.tokens >= request.max_tokens:
        return text + progress.pipeline.flush(), "length"
    return text, None
