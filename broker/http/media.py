"""The bytes of images and videos in the house: each content once, all of them within a budget. Pure.

A request holds its frames from their arrival until its answer has been sent, which is longer than any of its
flights lasts: all its choices share them, and so does whoever sends the same image meanwhile. When nobody is
in the house, nothing is held.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.dialects.formats import Frame


@dataclass(slots=True)
class _Shared:
    frame: Frame
    holders: int = 0


class MediaMemory:
    """What all requests hold. Used on the event loop only."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self._shared: dict[str, _Shared] = {}

    def __len__(self) -> int:
        """Frames, each content once."""
        return len(self._shared)

    def open(self) -> Held:
        """What a new request holds."""
        return Held(self)

    def allocate(self, count: int) -> bool:
        """False, and nothing is held, where there is no room for so many bytes."""
        if self.held + count > self.bytes_max:
            return False
        self.held += count
        return True

    def free(self, count: int) -> None:
        self.held -= count

    def find(self, sha256: str) -> Frame | None:
        """The frame that somebody holds already."""
        shared = self._shared.get(sha256)
        return shared.frame if shared is not None else None

    def share(self, frame: Frame) -> None:
        """One holder more; of the first its bytes are counted already."""
        self._shared.setdefault(frame.sha256, _Shared(frame)).holders += 1

    def let_go(self, sha256: str) -> None:
        """One holder less; the last one frees it."""
        shared = self._shared[sha256]
        shared.holders -= 1
        if not shared.holders:
            del self._shared[sha256]
            self.free(len(shared.frame.data))


class Held:
    """What one request holds: whole frames, and bytes on their way that will become some."""

    def __init__(self, memory: MediaMemory) -> None:
        self._memory = memory
        self._frames: dict[str, Frame] = {}
        self._arriving = 0

    def fits_alone(self, count: int) -> bool:
        """Whether there would be room for so many bytes more if nobody else were here."""
        held = self._arriving + sum(len(frame.data) for frame in self._frames.values())
        return held + count <= self._memory.bytes_max

    def expect(self, count: int) -> bool:
        """Room for bytes that arrive one by one; False where there is none."""
        if not self._memory.allocate(count):
            return False
        self._arriving += count
        return True

    def keep(self, frame: Frame, *, expected: int = 0) -> Frame | None:
        """The frame to go on with: an equal one, if there was any. None: there is no room for it.

        `expected`: how many of its bytes there is room for already.
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
        """All of it. Idempotent."""
        self._forget(self._arriving)
        while self._frames:
            self._memory.let_go(self._frames.popitem()[0])
