"""How requests were answered over HTTP: statuses, errors by their codes, and the last of these. Pure.

It has those too that never came near a model. No text of anybody's: of what was asked, the path.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

REFUSALS_MAX = 64
PATH_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was answered with an error. `id`: as its answer names it."""

    at: float
    id: str
    method: str
    path: str
    status: int
    code: str


class Tally:
    """One per gateway."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.refusals: deque[Refusal] = deque(maxlen=REFUSALS_MAX)

    def answered(self, status: int) -> None:
        """An answer begins."""
        self.statuses[status] += 1

    def failed(self, code: str) -> None:
        """It is an error, of this code."""
        self.errors[code] += 1

    def refused(self, at: float, *, id: str, method: str, path: str, status: int, code: str) -> None:
        """Of a request for something: it is remembered."""
        self.refusals.append(Refusal(at, id, method, path[:PATH_CHARS_MAX], status, code))
