"""Forced tokens: the thinking budget, which closes reasoning that has used up its tokens.

Forced tokens are a function of the output's tokens alone, so they are the same after a restart. Decoding is
double-buffered: when a token is sampled, the host knows all tokens but the one before it. That is enough.
Where the reasoning began is known when its first token is fed, and whether the one unread token closes it is
tested on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from worker.contract.engine import ThinkingBudget


class ForcedToken(NamedTuple):
    """A forced token; not forced if the token before it is one of `unless_after`."""

    token: int
    unless_after: tuple[int, ...] = ()


class ThinkingGuard:
    """Tracks the reasoning of one output against its budget. Indices are into the output."""

    def __init__(self, limit: ThinkingBudget, answered: Sequence[int]) -> None:
        self._limit = limit
        self._ends = tuple(token for token in (limit.closing[0], limit.calling) if token is not None)
        self._count = 0
        self._latest: deque[int] = deque(maxlen=len(limit.opening))
        self._due: int | None = limit.tokens if limit.is_open else None
        """Index at which the open reasoning is closed at the latest; None: none is open."""
        self._closed_at: int | None = None
        """Index at which the last reasoning was closed that used up its budget."""
        for token in answered:
            self.accept_token(token)

    def accept_token(self, token: int) -> None:
        """Record the next token of the output."""
        index = self._count
        self._count += 1
        self._latest.append(token)
        if self._due is not None:
            if token in self._ends:
                is_closed = token == self._limit.closing[0] and index == self._due
                self._closed_at = index if is_closed else None
                self._due = None
        elif tuple(self._latest) == self._limit.opening:
            self._due = index + 1 + self._limit.tokens

    def forced(self, index: int) -> ForcedToken | None:
        """Return the forced token at `index`. All tokens but the one before it must have been seen, and none
        behind it."""
        closing = self._limit.closing
        if self._due is not None:
            if index < self._due:
                return None
            if index == self._due:
                return ForcedToken(closing[0], unless_after=self._ends)
            place = index - self._due  # behind a closing token that is certain but not seen yet
        elif self._closed_at is not None:
            place = index - self._closed_at
        else:
            return None
        return ForcedToken(closing[place]) if place < len(closing) else None

    def coming(self) -> tuple[int, ...]:
        """Return the tokens that are forced behind those seen so far: the rest of a closing sequence."""
        if self._due == self._count:
            return self._limit.closing
        return self._limit.closing[self._count - self._closed_at :] if self._closed_at is not None else ()
