"""Pool of two threads for chat templates and tokenization, behind a bounded and fair queue.

A Hugging Face tokenizer used by two threads at once fails with "Already borrowed", so each thread has its
own. Each is a *lane*: the first takes short requests only, the second the long ones too
(`preparation_queue`). All methods may be called on any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from protocol.common.log_context import about
from protocol.errors import Code, RequestError
from protocol.messages import Request
from protocol.tasks import runs_nothing
from protocol.types import PreparationStatus
from worker.input.preparation_queue import PreparationQueue, entry_of
from worker.interfaces import Preparer, TextsPreparer
from worker.values import CancelToken, EngineRequest, PreparationCancelled, PreparedTexts, Tokenized

log = logging.getLogger(__name__)

THREADS = 2
WARM_S_MAX = 10.0
PREPARE_S_MAX = 600.0
"""Maximum seconds of work on one request. If a thread exceeds it, requests can wait for it for ever, and the
worker exits."""

Outcome = EngineRequest | PreparedTexts | Tokenized | RequestError
_AnyPreparer = Preparer | TextsPreparer
_Done = Callable[[str, Outcome], None]


@dataclass(slots=True, eq=False)
class _Lane:
    """One thread. `is_active`: it takes requests until there are none. `began_at`: when it began its present
    request."""

    short_only: bool
    executor: ThreadPoolExecutor
    preparer: _AnyPreparer | None = None
    is_active: bool = False
    began_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    request: Request
    media: Sequence[bytes]
    done: _Done
    cancel_token: CancelToken = field(default_factory=CancelToken)


class PreparerPool:
    """Prepares requests beside the I/O thread."""

    def __init__(self, open_preparer: Callable[[], _AnyPreparer]) -> None:
        """`open_preparer` is called once on each thread. Requests must be of its model's task."""
        self._open = open_preparer
        self._lanes = [
            _Lane(short_only, ThreadPoolExecutor(1, thread_name_prefix="prepare"))
            for short_only in (True, False)
        ]
        self._lock = threading.Lock()
        self._queue = PreparationQueue()
        self._jobs: dict[str, _Job] = {}
        self._is_closed = False

    def warm(self) -> None:
        """Open every thread's preparer in advance. After a failure, the first request tries again and reports
        the error."""
        wait([lane.executor.submit(self._warm, lane) for lane in self._lanes], timeout=WARM_S_MAX)

    def _warm(self, lane: _Lane) -> None:
        try:
            self._preparer(lane)
        except Exception:  # the request boundary: reported with the first request
            log.debug("a preparer cannot be opened", exc_info=True)

    def _preparer(self, lane: _Lane) -> _AnyPreparer:
        lane.preparer = lane.preparer or self._open()
        return lane.preparer

    def prepare(self, request: Request, media: Sequence[bytes], done: _Done) -> None:
        """Prepare a request; `done(id, outcome)` is called on a thread of the pool, unless it is cancelled.

        Raises `RequestError(text_generation_busy)` if the queue is full.
        """
        entry = entry_of(request, media, time.monotonic())
        with self._lock:
            self._queue.add(entry)
            self._jobs[request.id] = _Job(request, media, done)
            fit = (lane for lane in self._lanes if entry.is_short or not lane.short_only)
            lane = next((lane for lane in fit if not lane.is_active), None)
            if lane is not None:
                lane.is_active = True
        if lane is not None:
            lane.executor.submit(self._serve, lane)

    def cancel(self, id: str) -> None:
        """Cancel a request: it leaves the queue, or ends after the present piece of work. Idempotent."""
        with self._lock:
            if job := self._jobs.get(id):
                job.cancel_token.cancel()
                if self._queue.cancel(id):
                    del self._jobs[id]

    def status(self) -> PreparationStatus:
        """Return the statistics of the queue."""
        with self._lock:
            return self._queue.status(time.monotonic())

    def is_stuck(self, now: float) -> bool:
        """Return whether a thread exceeds `PREPARE_S_MAX`. `now`: the monotonic clock."""
        began = [lane.began_at for lane in self._lanes]
        return any(each is not None and now - each > PREPARE_S_MAX for each in began)

    def _serve(self, lane: _Lane) -> None:
        """Prepare requests until there are none for this lane."""
        while (job := self._next(lane)) is not None:
            lane.began_at = time.monotonic()
            outcome = self._outcome(lane, job)
            lane.began_at = None
            with self._lock:
                self._queue.finish(job.request.id)
                self._jobs.pop(job.request.id, None)
            if outcome is not None:
                job.done(job.request.id, outcome)

    def _next(self, lane: _Lane) -> _Job | None:
        with self._lock:
            entry = None
            if not self._is_closed:
                entry = self._queue.take(time.monotonic(), short_only=lane.short_only)
            lane.is_active = entry is not None
            return self._jobs[entry.id] if entry else None

    def _outcome(self, lane: _Lane, job: _Job) -> Outcome | None:
        """Return what became of a request; None: it was cancelled."""
        request = job.request
        outcome: Outcome
        try:
            job.cancel_token.check()
            preparer: Any = self._preparer(lane)
            take = preparer.tokenize if runs_nothing(request) else preparer.prepare
            outcome = take(request, job.media, job.cancel_token)
        except PreparationCancelled:
            return None
        except RequestError as error:
            outcome = error
        except Exception as error:  # the request boundary: fails this request only
            log.exception("%s could not be prepared", request.id, extra=about(request.id))
            name = type(error).__name__
            outcome = RequestError(Code.INTERNAL_ERROR, f"The request could not be prepared ({name}).")
        return outcome

    def close(self) -> None:
        """Begin no more requests, and end those at work after their present piece."""
        with self._lock:
            self._is_closed = True
            for job in self._jobs.values():
                job.cancel_token.cancel()
        for lane in self._lanes:
            lane.executor.shutdown(wait=False, cancel_futures=True)
