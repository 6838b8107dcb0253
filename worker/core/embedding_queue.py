"""Batching queue of texts to encode: batches of about equal length, fair between requests. Pure.

Texts of a batch are padded to the longest, so a batch holds texts of similar length: the longest text left of
the request whose turn it is, and the next shorter ones of any request. A request pays for its tokens, padding
included, and the one that has paid least has the turn. A new request starts with the lowest amount paid in
the queue. So a single text waits for a step or two beside any list, and single texts cannot starve a list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from worker.core.prefill_cost import PrefillBudget, PrefillCall
from worker.values import PreparedTexts, Text

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
