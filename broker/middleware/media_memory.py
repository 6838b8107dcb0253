"""Memory of images and videos in flight: identical content is stored once, within a budget. Pure.

A request leases its frames from their arrival until its response has been sent, longer than any of its
flights: all its choices share them, and so do concurrent requests with the same image.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from broker.dialects.media_types import Frame


@dataclass(slots=True)
class _Shared:
    frame: Frame
    holders: int = 0


class MediaMemory:
    """Memory budget of all requests' media. Used on the event loop only."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self._shared: dict[str, _Shared] = {}

    def __len__(self) -> int:
        """Return the number of distinct frames."""
        return len(self._shared)

    @contextmanager
    def lease(self) -> Iterator[MediaLease]:
        """Lease media for a request, and free them on exit."""
        lease = MediaLease(self)
        try:
            yield lease
        finally:
            lease.free()

    def allocate(self, count: int) -> bool:
        """Allocate `count` bytes; returns False, without allocating, if they exceed the budget."""
        if self.held + count > self.bytes_max:
            return False
        self.held += count
        return True

    def free(self, count: int) -> None:
        self.held -= count

    def find(self, sha256: str) -> Frame | None:
        """Return the frame with this digest, if any request has it."""
        shared = self._shared.get(sha256)
        return shared.frame if shared is not None else None

    def share(self, frame: Frame) -> None:
        """Add a reference to a frame; the bytes of the first one are allocated already."""
        self._shared.setdefault(frame.sha256, _Shared(frame)).holders += 1

    def release(self, sha256: str) -> None:
        """Drop a reference to a frame; the last one frees it."""
        shared = self._shared[sha256]
        shared.holders -= 1
        if not shared.holders:
            del self._shared[sha256]
            self.free(len(shared.frame.data))


class MediaLease:
    """Media of one request: complete frames, and the bytes of those that are arriving."""

    def __init__(self, memory: MediaMemory) -> None:
        self._memory = memory
        self._frames: dict[str, Frame] = {}
        self._arriving = 0

    def fits_alone(self, count: int) -> bool:
        """Return whether `count` more bytes would fit if no other request had media."""
        held = self._arriving + sum(len(frame.data) for frame in self._frames.values())
        return held + count <= self._memory.bytes_max

    def expect(self, count: int) -> bool:
        """Allocate `count` arriving bytes; returns False if they exceed the budget."""
        if not self._memory.allocate(count):
            return False
        self._arriving += count
        return True

    def keep(self, frame: Frame, *, expected: int = 0) -> Frame | None:
        """Add a frame. Return it, or an equal one that is stored already; None if it exceeds the budget.

        `expected`: how many of its bytes were allocated by `expect`.
        """
        if (known := self._memory.find(frame.sha256)) is None:
            if not self._memory.allocate(len(frame.data) - expected):
                return None
            self._arriving -= expected
            known = frame
        else:
            self._forget(expected)
        if frame.sha256 not in self._frames:
            self._memory.share(known)
            self._frames[frame.sha256] = known
        return known

    def _forget(self, count: int) -> None:
        self._arriving -= count
        self._memory.free(count)

    def free(self) -> None:
        """Free everything. Idempotent."""
        self._forget(self._arriving)
        while self._frames:
            self._memory.release(self._frames.popitem()[0])
