"""Whose texts are encoded next: batches of about equal length, fair between requests. Pure.

Texts of one batch are padded to the longest of them, so a batch is made of neighbours in length: the longest
that is left of the request whose turn it is, and what comes next to it, of any request. A request pays for
the places that its texts take, padding included, and the turn is with who has paid least; who comes anew has
paid as much as who has paid least of those that are here. So a single text waits for a step or two beside any
list, and no stream of single ones keeps a list waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from worker.schedule.pace import Budget, Work
from worker.texts import PreparedTexts, Text

TEXTS_MAX = 64
"""Of one batch: the gateway writes them out between two events of other clients."""
TOKENS_MIN = 128
"""Of one batch, where there are so many: what a call itself costs is shared, however busy the machine is."""
PADDED_SHARE = 0.5
"""A text of another request joins a batch whose longest is at most twice as long."""


@dataclass(slots=True, eq=False)
class Request:
    """One request's texts. `left`: the places of those that wait, the shortest first."""

    prepared: PreparedTexts
    number: int
    arrived_at: float
    left: list[int]
    paid: int = 0
    sent: int = 0
    """How often vectors of it were told."""
    done_tokens: int = 0
    began_at: float | None = None

    @property
    def id(self) -> str:
        return self.prepared.id

    def length(self, place: int) -> int:
        return len(self.prepared.texts[place].tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """One text of a batch, and whose it is."""

    request: Request
    place: int

    @property
    def text(self) -> Text:
        return self.request.prepared.texts[self.place]


Batch = list[Place]


@dataclass(slots=True)
class TextQueue:
    """Requests with texts that wait."""

    _requests: dict[str, Request] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def get(self, id: str) -> Request | None:
        return self._requests.get(id)

    def add(self, prepared: PreparedTexts, now: float) -> Request:
        """One that is not here."""
        lengths = [len(text.tokens) for text in prepared.texts]
        left = sorted(set(range(len(lengths))) - prepared.answered, key=lengths.__getitem__)
        paid = min((request.paid for request in self._requests.values()), default=0)
        request = Request(prepared, next(self._numbers), now, left, paid)
        self._requests[prepared.id] = request
        return request

    def drop(self, id: str) -> Request | None:
        """Unknown ones are no error."""
        return self._requests.pop(id, None)

    def overdue(self, now: float) -> list[Request]:
        """Whose deadline has passed."""
        return [
            request
            for request in self._requests.values()
            if request.prepared.deadline_s is not None
            and now - request.arrived_at > request.prepared.deadline_s
        ]

    def take(self, budget: Budget) -> Batch:
        """The next batch, as large as `budget` allows, one text at least: they wait no longer. Empty where
        none does."""
        turns = sorted(
            (request for request in self._requests.values() if request.left),
            key=lambda request: (request.prepared.priority, request.paid, request.number),
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

    def _fits(self, request: Request, longest: int, shortest: float, texts: int, budget: Budget) -> bool:
        at = bisect_right(request.left, longest, key=request.length)
        if not at or texts == TEXTS_MAX or request.length(request.left[at - 1]) < shortest:
            return False
        if not texts or (texts + 1) * longest <= min(TOKENS_MIN, budget.tokens_max):
            return True
        return budget.holds(work_of(texts + 1, longest))

    def _pop(self, request: Request, longest: int) -> Place:
        place = request.left.pop(bisect_right(request.left, longest, key=request.length) - 1)
        request.paid += longest
        return Place(request, place)


def work_of(texts: int, longest: int) -> Work:
    """What a batch of so many is to the pace."""
    return Work.call(texts, longest, 0)
