"""Gate of an answer: readers get only what is on the disk, so that a later gateway renders the same. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

DISK_S_MAX = 0.5
"""Longest wait for the disk in seconds, before readers get what is not on it."""


class DiskGate:
    """Holds chunks of an answer back until the journal has committed what they are rendered from."""

    def __init__(self, clock: Callable[[], float], on_hold: Callable[[], object]) -> None:
        """`on_hold`: called when chunks begin to wait."""
        self.written = 0
        """Number of the journal's operation that has the latest output; 0: it takes none."""
        self._clock = clock
        self._on_hold = on_hold
        self._unwritten: deque[tuple[int, int]] = deque()
        """Numbers of operations that are not on the disk yet, and of the chunks up to each."""
        self._limit = 0
        self._since = 0.0

    @property
    def limit(self) -> int | None:
        """Number of chunks that readers may have; None: all."""
        return self._limit if self._unwritten else None

    def hold(self, count: int) -> bool:
        """Hold back the last of `count` chunks. Return False if the journal does not take it either."""
        if not self.written:
            return False
        if not self._unwritten:
            self._limit, self._since = count - 1, self._clock()
            self._on_hold()
        self._unwritten.append((self.written, count))
        return True

    def advance(self, committed: int) -> bool:
        """Let readers have what is on the disk now. Return whether that is more than before."""
        before = self._limit
        while self._unwritten and self._unwritten[0][0] <= committed:
            self._limit = self._unwritten.popleft()[1]
        if self._limit > before:
            # Only then: the journal also calls after a group that the disk has not taken.
            self._since = self._clock()
        return self._limit > before

    @property
    def is_late(self) -> bool:
        """Whether chunks wait for too long, whatever their numbers: a journal whose disk has failed never
        commits these operations."""
        return bool(self._unwritten) and self._clock() - self._since >= DISK_S_MAX
