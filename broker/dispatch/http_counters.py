"""HTTP counters: status codes, error codes and the latest errors. Pure.

They include requests that never reached a model. Of a request's content, only the path is stored.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

REFUSALS_MAX = 64
PATH_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was answered with an error. `id`: the one in the response."""

    at: float
    id: str
    method: str
    path: str
    status: int
    code: str


class HttpCounters:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.refusals: deque[Refusal] = deque(maxlen=REFUSALS_MAX)

    def answered(self, status: int) -> None:
        """Count the status of a response."""
        self.statuses[status] += 1

    def failed(self, code: str) -> None:
        """Count an error code."""
        self.errors[code] += 1

    def refused(self, at: float, *, id: str, method: str, path: str, status: int, code: str) -> None:
        """Record a request that was answered with an error."""
        self.refusals.append(Refusal(at, id, method, path[:PATH_CHARS_MAX], status, code))
