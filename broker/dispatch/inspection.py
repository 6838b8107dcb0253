"""The last requests as they came, for those who look into them. Pure.

There is one only where `--inspect` says so. What it keeps is in memory alone, and bounded in number and in
bytes; a flight that is kept goes on telling what becomes of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from broker.dispatch.flight import Flight
from protocol.messages import Generate
from protocol.tasks import runs_nothing

KEPT_MAX = 32
KEPT_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Kept:
    """One answer's request. `body`: as its client sent it, to `path`."""

    path: str
    body: bytes
    flight: Flight
    request: Generate

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(map(len, self.flight.media))


class Inspection:
    """Those that are kept, the eldest first."""

    def __init__(self) -> None:
        self.kept: deque[Kept] = deque(maxlen=KEPT_MAX)

    @contextmanager
    def keeping(
        self, path: str, body: bytes, boarding: AbstractContextManager[list[Flight]]
    ) -> Iterator[list[Flight]]:
        """`boarding`, whose flights are kept from then on: those that a model answers with text."""
        with boarding as flights:
            for flight in flights:
                request = flight.request
                # One without an answer asks after likelihoods only, as those do who look into others.
                if isinstance(request, Generate) and not runs_nothing(request) and request.max_tokens != 0:
                    self._keep(Kept(path, body, flight, request))
            yield flights

    def find(self, id: str) -> Kept | None:
        return next((kept for kept in self.kept if kept.flight.id == id), None)

    def _keep(self, kept: Kept) -> None:
        self.kept.append(kept)
        while len(self.kept) > 1 and sum(each.nbytes for each in self.kept) > KEPT_BYTES_MAX:
            self.kept.popleft()
