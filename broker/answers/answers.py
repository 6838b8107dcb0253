"""All durable answers of a gateway, by idempotency key, id and conversation. Pure: the clock is handed in.

An answer is kept for `window_s` after its end, or after its last reader left, whichever is later; one that
still runs without readers is given up at that time, unless it is durable. Their memory is bounded: at the
bound, finished answers are forgotten, the oldest first, and then the largest running one fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from broker.answers.answer import Answer, DiskGate, Scheduler
from broker.dispatch.flight import Flight
from protocol.errors import Code, RequestError

log = logging.getLogger(__name__)

ANSWERS_MAX = 16_384
"""Maximum number of answers that are kept or run."""
ANSWERS_BYTES_MAX = 256 * 2**20
"""Maximum memory of all answers."""
Index = Literal["key", "name", "conversation"]
"""Attribute of answers by which they are found; the owner belongs to it."""
REUSED = "The idempotency key was used for another request, whose answer is still kept."
FULL = "The memory for answers that can be read again is full."


class DurableAnswers:
    """Registry of the answers. For use on the event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        scheduler: Callable[[], Scheduler],
        *,
        give_up: Callable[[Flight, Code, str], None],
        window_s: float,
        count_max: int = ANSWERS_MAX,
        bytes_max: int = ANSWERS_BYTES_MAX,
    ) -> None:
        """`scheduler`: returns that of the running loop. `give_up`: fails a flight and cancels it at its
        worker."""
        self.window_s = window_s
        self.counts: Counter[str] = Counter()
        """Answers since the start: `kept`, `joined` by a later reader, `abandoned`, `evicted`, `refused`."""
        self._clock = clock
        self._give_up = give_up
        self._scheduler = scheduler
        self._count_max = count_max
        self._bytes_max = bytes_max
        self.committed: Callable[[], int] = lambda: 0
        """Returns the number of the journal's last operation that is on the disk."""
        self._held: dict[Answer, None] = {}
        self._all: dict[Answer, None] = {}
        self._used = 0
        self._index: dict[tuple[Index, str, str], Answer] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Answer]:
        return iter(list(self._all))

    @property
    def nbytes(self) -> int:
        """Memory of all answers, as of the last sweep."""
        return self._used

    @property
    def running(self) -> int:
        return sum(not answer.over for answer in self._all)

    def find(self, owner: str, name: str, by: Index = "name") -> Answer | None:
        """Return the answer with this public id, or of this conversation."""
        return self._index.get((by, owner, name))

    def claim(self, owner: str, key: str, digest: bytes) -> tuple[Answer, bool]:
        """Return the answer of an idempotency key, and whether it is new: then the caller opens it.

        One that failed is computed anew. Raises `RequestError` if the key stands for another request, or
        nothing more can be kept.
        """
        answer = self.find(owner, key, "key")
        if answer is None or (answer.end is not None and answer.end.has_failed):
            return self.new(owner, key=key, digest=digest), True
        if answer.digest != digest:
            raise RequestError(Code.IDEMPOTENCY_KEY_REUSED, REUSED)
        self.counts["joined"] += 1
        return answer, False

    def new(self, owner: str, *, key: str = "", digest: bytes = b"") -> Answer:
        """Add an answer. Raises `RequestError` if nothing more can be kept."""
        self._make_room(1)
        if len(self._all) >= self._count_max or self._used >= self._bytes_max:
            self.counts["refused"] += 1
            raise RequestError(Code.TEXT_GENERATION_BUSY, FULL, retry_after_s=1.0)
        answer = Answer(self._scheduler(), owner, key, digest, is_durable=True, left_at=self._clock())
        self._all[answer] = None
        if key:
            self._index["key", owner, key] = answer
        self.counts["kept"] += 1
        return answer

    def name(self, answer: Answer, name: str, conversation: str = "", created: int = 0) -> None:
        """Make the answer known by its public id, and as the latest one of a conversation.

        The one before is dropped, unless it is being read.
        """
        answer.name, answer.conversation, answer.created = name, conversation, created
        self._index["name", answer.owner, name] = answer
        if conversation:
            former = self.find(answer.owner, conversation, "conversation")
            if former is not None and former.left_at is not None:
                self.drop(former)
            self._index["conversation", answer.owner, conversation] = answer

    def drop(self, answer: Answer) -> None:
        """Forget an answer, and end it if it runs."""
        self._all.pop(answer, None)
        self._forget(answer, "key")
        self._forget(answer, "name")
        self._forget(answer, "conversation")
        answer.drop()

    def _forget(self, answer: Answer, by: Index) -> None:
        entry = (by, answer.owner, getattr(answer, by))
        if self._index.get(entry) is answer:
            del self._index[entry]

    def wait_for_disk(self, answer: Answer) -> None:
        """Let readers have only what the journal has from now on."""
        answer.disk = DiskGate(self._clock, partial(self._held.setdefault, answer))

    def on_committed(self) -> None:
        """Let readers have what the journal has written."""
        committed = self.committed()
        for answer in list(self._held):
            if not answer.show(committed):
                self._held.pop(answer, None)

    def flush(self) -> None:
        """Write what was collected of the answers. Call this before the journal is closed."""
        for answer in self._all:
            answer.flush(0.0)

    def sweep(self) -> None:
        """Write what was collected, and forget what nobody has come back for. Call this a few times a
        second."""
        now = self._clock()
        for answer in list(self._all):
            answer.sweep()
            if answer.left_at is None or (answer.end is None and answer.in_background):
                continue
            since = answer.left_at if answer.end is None else max(answer.left_at, answer.end.at)
            if now - since >= self.window_s:
                if answer.end is None:
                    self.counts["abandoned"] += 1
                self.drop(answer)
        self._used = sum(answer.nbytes for answer in self._all)
        self._make_room(0)

    def _make_room(self, count: int) -> None:
        """Evict answers until `count` more may be added."""
        if self._used <= self._bytes_max and len(self._all) + count <= self._count_max:
            return
        for answer in list(self._all):
            if answer.over and answer.left_at is not None:
                self._used -= answer.nbytes
                self.counts["evicted"] += 1
                self.drop(answer)
            if self._used <= self._bytes_max and len(self._all) + count <= self._count_max:
                return
        if self._used > self._bytes_max:
            most = max(self._all, key=lambda answer: answer.nbytes)
            log.warning("the answer %s fails: %s", most.name, FULL)
            self.counts["evicted"] += 1
            self._used -= most.nbytes
            self._forget(most, "key")
            for _, flight in most.flights:
                self._give_up(flight, Code.TEXT_GENERATION_BUSY, FULL)
            if most.over:
                self.drop(most)
