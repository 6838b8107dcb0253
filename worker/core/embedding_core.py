"""Model thread of an embedding or rerank model: takes commands, picks a batch, encodes, publishes.

A small version of `engine_core`: one batch at a time, bounded by the cost model, so that commands are handled
between two and a chat model on the same machine gets its turn. A failed batch is retried request by request,
so that only the request at fault fails.

Texts of a batch are padded to the longest, so a batch holds texts of similar length: the longest text left of
the request whose turn it is, and the next shorter ones of any request. A request pays for its tokens, padding
included, and the one that has paid least has the turn. A new request starts with the lowest amount paid in
the queue. So a single text waits for a step or two beside any list, and single texts cannot starve a list.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from protocol.common.log_context import about
from protocol.errors import Code, RequestError
from protocol.types import RequestStatus, Resources, Timings, Usage
from worker.core.commands import Abort, ClearPrefixes, Command, RelieveMemory, Stop, SubmitTexts
from worker.core.engine_core import OUTBOX_MESSAGES_MAX, PAUSE_S
from worker.core.failures import Failures, engine_error
from worker.core.prefill import PrefillBudget, PrefillCall, PrefillCostModel
from worker.core.publisher import TOLD_EVERY_S, Counters, Publisher
from worker.interfaces import EmbeddingModel
from worker.process.device_errors import raise_if_device_failed
from worker.values import PreparedTexts, Text

log = logging.getLogger(__name__)

TEXTS_MAX = 64
"""Maximum texts of a batch: the gateway writes them out between two events of other clients."""
TOKENS_MIN = 128
"""Padded tokens that a batch may always have, however busy the machine is, to share the cost of a call."""
PADDED_SHARE = 0.5
"""Minimum length of another request's text, as a share of the batch's longest."""


@dataclass(slots=True, eq=False)
class EmbeddingRequest:
    """One request's texts. `left`: indices of the waiting ones, shortest first."""

    engine_request: PreparedTexts
    number: int
    arrived_at: float
    left: list[int]
    paid: int = 0
    sent: int = 0
    """Number of messages with vectors that were published."""
    done_tokens: int = 0
    began_at: float | None = None

    @property
    def id(self) -> str:
        return self.engine_request.id

    def length(self, place: int) -> int:
        return len(self.engine_request.texts[place].tokens)


@dataclass(frozen=True, slots=True)
class QueuedText:
    """One text of a batch, by its request and its index (`place`) there."""

    request: EmbeddingRequest
    place: int

    @property
    def text(self) -> Text:
        return self.request.engine_request.texts[self.place]


Batch = list[QueuedText]


@dataclass(slots=True)
class TextQueue:
    """Requests with waiting texts."""

    _requests: dict[str, EmbeddingRequest] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[EmbeddingRequest]:
        return iter(list(self._requests.values()))

    def get(self, id: str) -> EmbeddingRequest | None:
        return self._requests.get(id)

    def add(self, engine_request: PreparedTexts, now: float) -> EmbeddingRequest:
        """Add a request, which must not be in the queue yet."""
        lengths = [len(text.tokens) for text in engine_request.texts]
        left = sorted(set(range(len(lengths))) - engine_request.answered, key=lengths.__getitem__)
        paid = min((request.paid for request in self._requests.values()), default=0)
        request = EmbeddingRequest(engine_request, next(self._numbers), now, left, paid)
        self._requests[engine_request.id] = request
        return request

    def drop(self, id: str) -> EmbeddingRequest | None:
        """Remove and return a request; None if it is unknown."""
        return self._requests.pop(id, None)

    def overdue(self, now: float) -> list[EmbeddingRequest]:
        """Return the requests whose deadline has passed."""
        return [
            request
            for request in self._requests.values()
            if request.engine_request.deadline_s is not None
            and now - request.arrived_at > request.engine_request.deadline_s
        ]

    def take(self, budget: PrefillBudget) -> Batch:
        """Remove and return the next batch, as large as `budget` allows, at least one text; empty if none
        waits."""
        turns = sorted(
            (request for request in self._requests.values() if request.left),
            key=lambda request: (request.engine_request.priority, request.paid, request.number),
        )
        if not turns:
            return []
        longest = turns[0].length(turns[0].left[-1])
        batch: Batch = []
        for turn, request in enumerate(turns):
            shortest = PADDED_SHARE * longest if turn else 0
            while self._fits(request, longest, shortest, len(batch), budget):
                batch.append(self._pop(request, longest))
        return batch

    def _fits(
        self, request: EmbeddingRequest, longest: int, shortest: float, texts: int, budget: PrefillBudget
    ) -> bool:
        at = bisect_right(request.left, longest, key=request.length)
        if not at or texts == TEXTS_MAX or request.length(request.left[at - 1]) < shortest:
            return False
        if not texts or (texts + 1) * longest <= min(TOKENS_MIN, budget.tokens_max):
            return True
        return budget.holds(PrefillCall((texts + 1) * longest, 0))

    def _pop(self, request: EmbeddingRequest, longest: int) -> QueuedText:
        place = request.left.pop(bisect_right(request.left, longest, key=request.length) - 1)
        request.paid += longest
        return QueuedText(request, place)


STEP_SHARE = 0.5
"""Maximum duration of a batch, as a share of the inter-token target of streams on the same machine."""


@dataclass(slots=True)
class EmbeddingCore:
    """The loop of one worker over its requests."""

    model: EmbeddingModel
    pace: PrefillCostModel
    inbox: queue.SimpleQueue[Command]
    publisher: Publisher
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    device_memory: Callable[[], Resources] = Resources
    _queue: TextQueue = field(default_factory=TextQueue)
    _failures: Failures = field(default_factory=Failures)
    _published_at: float = -math.inf

    def run(self) -> None:
        """Run until `Stop`. Raises `failures.EngineKeepsFailing`."""
        self._count()  # report the model's memory before the first request
        while self._take_commands():
            if self.publisher.backlog() < OUTBOX_MESSAGES_MAX and len(self._queue):
                self._step()

    # --- commands ---

    def _take_commands(self) -> bool:
        """Handle all queued commands; wait for one when idle. Return False on `Stop`."""
        is_clogged = self.publisher.backlog() >= OUTBOX_MESSAGES_MAX
        wait_s = None if not len(self._queue) else PAUSE_S if is_clogged else 0.0
        while True:
            try:
                command = self.inbox.get(block=wait_s != 0.0, timeout=wait_s)
            except queue.Empty:
                return True
            if isinstance(command, Stop):
                return False
            self._obey(command)
            self._count()
            wait_s = 0.0

    def _obey(self, command: Command) -> None:
        match command:
            case SubmitTexts(request):
                self._submit(request)
            case Abort(id):
                self._queue.drop(id)
            case RelieveMemory(relief) if relief:
                self.model.release_memory()
            case ClearPrefixes(id):
                self.publisher.cleared(id, 0, 0)

    def _submit(self, engine_request: PreparedTexts) -> None:
        if self._queue.get(engine_request.id) is not None:
            # The request in the queue answers the flight at the gateway.
            log.warning("%s: ignored a duplicate request", engine_request.id, extra=about(engine_request.id))
            return
        request = self._queue.add(engine_request, self.clock())
        if not request.left:
            self._finish(request)

    # --- steps ---

    def _step(self) -> None:
        for request in self._queue.overdue(self.clock()):
            self._fail(request, RequestError(Code.DEADLINE_EXCEEDED))
        if batch := self._queue.take(self.pace.budget(decoding=True)):
            for request in _requests(batch):
                request.began_at = request.began_at or self.clock()
            self._count()  # a request stuck in this step is reported as running
            self._encode(batch)
        self.counters.steps += 1
        self._count()

    def _encode(self, batch: Batch) -> None:
        began = self.clock()
        try:
            vectors = self.model.encoder.encode([place.text for place in batch])
        except Exception as error:  # the request boundary
            raise_if_device_failed(error)
            log.exception("%s: encoding failed", ", ".join(request.id for request in _requests(batch)))
            self._retry_apart(batch, error)
            return
        self._failures.in_a_row = 0
        longest = max(len(place.text.tokens) for place in batch)
        self.pace.learn(self.clock() - began, decoded=False, calls=[PrefillCall(len(batch) * longest, 0)])
        self._hand_out(batch, vectors)

    def _hand_out(self, batch: Batch, vectors: Sequence[bytes]) -> None:
        told = dict(zip(batch, vectors, strict=True))
        for request, mine in _apart(batch).items():
            joined = b"".join(told[place] for place in mine)
            self.publisher.encoded(request.id, request.sent, [place.place for place in mine], joined)
            request.sent += 1
            request.done_tokens += sum(len(place.text.tokens) for place in mine)
            if not request.left:
                self._finish(request)

    def _retry_apart(self, batch: Batch, error: Exception) -> None:
        apart = _apart(batch)
        if len(apart) > 1:
            for mine in apart.values():
                self._encode(mine)
            return
        self._fail(batch[0].request, engine_error(error))
        # The text is at fault, unless the model fails on a probe text as well.
        try:
            self.model.encoder.encode([Text((0, 0))])
        except Exception as failure:  # the model is at fault
            raise_if_device_failed(failure)
            log.exception("the model fails on a probe text as well")
            self._failures.count(failure)

    # --- ends ---

    def _finish(self, request: EmbeddingRequest) -> None:
        self._queue.drop(request.id)
        now = self.clock()
        began = now if request.began_at is None else request.began_at
        self.publisher.encoded_all(
            request.id,
            Usage(prompt_tokens=request.engine_request.tokens, completion_tokens=0),
            Timings(queued_s=began - request.arrived_at, prefill_s=now - began),
        )

    def _fail(self, request: EmbeddingRequest, error: RequestError) -> None:
        self._queue.drop(request.id)
        self.publisher.failed(request.id, error)

    def _count(self) -> None:
        self.counters.running = sum(request.began_at is not None for request in self._queue)
        self.counters.waiting = len(self._queue) - self.counters.running
        now = self.clock()
        if not len(self._queue) or now - self._published_at >= TOLD_EVERY_S:
            self._published_at = now
            self.counters.rows = [_status(request, now) for request in self._queue]
            self.counters.device = self.device_memory()


def _requests(batch: Batch) -> Iterable[EmbeddingRequest]:
    return _apart(batch).keys()


def _apart(batch: Batch) -> dict[EmbeddingRequest, Batch]:
    """Group the texts of a batch by request, in order."""
    found: dict[EmbeddingRequest, Batch] = {}
    for place in batch:
        found.setdefault(place.request, []).append(place)
    return found


def _status(request: EmbeddingRequest, now: float) -> RequestStatus:
    return RequestStatus(
        id=request.id,
        phase="waiting" if request.began_at is None else "prefill",
        prompt_tokens=request.engine_request.tokens,
        prefilled=request.done_tokens,
        seconds=max(0.0, now - request.arrived_at),
    )
