"""Tokens that must stand where they stand: a thought that has had its tokens is closed.

What is forced is a function of the answer's tokens alone, so it is the same after a restart, and whatever is
drawn beside it. Decoding is double-buffered: when a token is to be drawn, the host knows all but the one
before it. That is enough: where a thought began is known when its first token is fed, and whether the one
unread token closes it is asked on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from worker.contract import ThoughtLimit


class Forced(NamedTuple):
    """A token that must be drawn, unless the one before it is one of `unless_after`."""

    token: int
    unless_after: tuple[int, ...] = ()


class ThoughtGuard:
    """What has been seen of one answer's thoughts. Indices are into the answer."""

    def __init__(self, limit: ThoughtLimit, answered: Sequence[int]) -> None:
        self._limit = limit
        self._ends = tuple(token for token in (limit.closing[0], limit.calling) if token is not None)
        self._count = 0
        self._latest: deque[int] = deque(maxlen=len(limit.opening))
        self._due: int | None = limit.tokens if limit.is_open else None
        """Where the thought that is open is closed at the latest; None: none is open."""
        self._closed_at: int | None = None
        """Where the last thought was closed that had all its tokens."""
        for token in answered:
            self.saw(token)

    def saw(self, token: int) -> None:
        """The next token of the answer."""
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

    def forced(self, index: int) -> Forced | None:
        """What must stand there. All tokens but the one before it must have been seen, and none behind it."""
        closing = self._limit.closing
        if self._due is not None:
            if index < self._due:
                return None
            if index == self._due:
                return Forced(closing[0], unless_after=self._ends)
            place = index - self._due  # behind a closing that is certain and was not seen
        elif self._closed_at is not None:
            place = index - self._closed_at
        else:
            return None
        return Forced(closing[place]) if place < len(closing) else None

    def coming(self) -> tuple[int, ...]:
        """What must stand behind the tokens that have been seen, all of them: the rest of a closing."""
        if self._due == self._count:
            return self._limit.closing
        return self._limit.closing[self._count - self._closed_at :] if self._closed_at is not None else ()
