"""Pool of two threads for chat templates and tokenization, behind a bounded and fair queue.

A Hugging Face tokenizer used by two threads at once fails with "Already borrowed", so each thread has its
own. Each is a *lane*: the first takes short requests only, the second the long ones too. All methods may be
called on any thread.

Requests are *short* or *long*, by their estimated cost. One lane of the pool takes short ones only, so they
never wait behind a long one; the other takes long ones first, so short ones cannot starve them. Within each
of the two, clients take turns, and of one client's requests the one with the smallest arrival time plus cost,
in seconds, is next: the shortest first, but none is overtaken by those that arrive later than its own cost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from protocol.common.log_context import about
from protocol.conversation import packed_bytes
from protocol.errors import Code, RequestError
from protocol.messages import Generate, Request
from protocol.tasks import runs_nothing
from protocol.types import PreparationStatus
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

REQUESTS_MAX = 4096
"""Maximum number of requests in preparation; the gateway's own limit of waiting requests is far below."""
BYTES_MAX = 2**27
"""Maximum bytes of their messages and media. A request that is alone is accepted whatever its size."""
SHORT_COST_MAX = 2**18
"""Maximum cost of a short request, in bytes of text. To tokenize that many takes about 0.1 s."""
COST_PER_S = 2**21
"""Bytes of text that a tokenizer reads in a second, about."""
IMAGE_COST = SHORT_COST_MAX
"""Cost of images beside their bytes: a file of a few kilobytes may take a second to decode."""
GRAMMAR_COST = SHORT_COST_MAX
"""Cost of structured output: whatever its size, a grammar may take seconds to compile."""


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


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A request in preparation. `nbytes`: of its message and media. `cost`: the estimated work, in bytes of
    text. `arrived_at`: in seconds."""

    id: str
    client: str
    nbytes: int
    cost: int
    arrived_at: float

    @property
    def is_short(self) -> bool:
        return self.cost <= SHORT_COST_MAX

    @property
    def rank(self) -> float:
        """Place among the requests of the same client; the smallest is next."""
        return self.arrived_at + self.cost / COST_PER_S


def entry_of(request: Request, media: Sequence[bytes], now: float) -> QueueEntry:
    """Return the queue entry of a request that arrives at `now`."""
    text_bytes, cost = _text_bytes(request), 0
    if isinstance(request, Generate):
        calling = request.calling
        has_grammar = calling is not None and (calling.required or calling.name or calling.strict)
        cost = IMAGE_COST + sum(map(len, media)) if media else 0
        cost += GRAMMAR_COST if request.form is not None or has_grammar else 0
    nbytes = text_bytes + sum(map(len, media))
    return QueueEntry(request.id, request.client, nbytes, text_bytes + cost, now)


def _text_bytes(request: Request) -> int:
    if not isinstance(request, Generate):
        return 1 + memoryview(request.texts).nbytes + len(getattr(request, "query", ""))
    options = 0 if request.template_kwargs is UNSET else memoryview(request.template_kwargs).nbytes
    texts = (request.prompt or "", request.suffix, request.prediction, *request.stop)
    form = 0 if request.form is None else len(request.form.text)
    # The token ids of a prompt are only compared and copied.
    return 1 + packed_bytes(request) + options + form + sum(map(len, texts)) + len(request.tokens or ())


class PreparationQueue:
    """The requests in preparation: those that wait, and those that have a thread."""

    def __init__(self) -> None:
        self._turns: dict[bool, OrderedDict[str, list[QueueEntry]]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        """Those that wait, by whether they are short, then by client, in the order of the clients' turns."""
        self._waiting: dict[str, QueueEntry] = {}
        self._running: dict[str, QueueEntry] = {}
        self._nbytes = 0
        self._started = self._refused = self._cancelled = 0
        self._waited_s = 0.0

    def __len__(self) -> int:
        """Return the number of requests that wait or have a thread."""
        return len(self._running) + len(self._waiting)

    def add(self, entry: QueueEntry) -> None:
        """Add a request. Raises `RequestError(text_generation_busy)` if there is no room for it."""
        size = len(self)
        if size and (size >= REQUESTS_MAX or self._nbytes + entry.nbytes > BYTES_MAX):
            self._refused += 1
            message = (
                f"The model's tokenizer has {size} requests of {self._nbytes} bytes in progress and no room "
                f"for one of {entry.nbytes} bytes. Retry later."
            )
            raise RequestError(Code.TEXT_GENERATION_BUSY, message, retry_after_s=1.0)
        self._turns[entry.is_short].setdefault(entry.client, []).append(entry)
        self._waiting[entry.id] = entry
        self._nbytes += entry.nbytes

    def take(self, now: float, *, short_only: bool) -> QueueEntry | None:
        """Return the next request, which has a thread from now on; None: there is none for this lane."""
        for is_short in (True,) if short_only else (False, True):
            if clients := self._turns[is_short]:
                client = next(iter(clients))
                entry = min(clients[client], key=lambda entry: entry.rank)
                self._remove(entry)
                if client in clients:
                    clients.move_to_end(client)
                self._running[entry.id] = entry
                self._started += 1
                self._waited_s += max(0.0, now - entry.arrived_at)
                return entry
        return None

    def finish(self, id: str) -> None:
        """Remove a request that had a thread. Idempotent."""
        if entry := self._running.pop(id, None):
            self._nbytes -= entry.nbytes

    def cancel(self, id: str) -> bool:
        """Cancel a request; return whether it was waiting, and so has left the queue."""
        if id in self._running:
            self._cancelled += 1
            return False
        entry = self._waiting.get(id)
        if entry is None:
            return False
        self._remove(entry)
        self._nbytes -= entry.nbytes
        self._cancelled += 1
        return True

    def status(self, now: float) -> PreparationStatus:
        """Return the statistics for a heartbeat."""
        oldest = min((entry.arrived_at for entry in self._waiting.values()), default=now)
        return PreparationStatus(
            waiting=len(self._waiting),
            running=len(self._running),
            bytes=self._nbytes,
            oldest_s=max(0.0, now - oldest),
            started=self._started,
            waited_s=self._waited_s,
            refused=self._refused,
            cancelled=self._cancelled,
        )

    def _remove(self, entry: QueueEntry) -> None:
        del self._waiting[entry.id]
        clients = self._turns[entry.is_short]
        clients[entry.client].remove(entry)
        if not clients[entry.client]:
            del clients[entry.client]
