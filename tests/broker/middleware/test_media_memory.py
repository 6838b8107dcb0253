"""Memory of images in use: each content once, within a budget, and freed after the last request."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from broker.dialects.media_types import Frame
from broker.middleware.media_memory import MediaLease, MediaMemory

BYTES_MAX = 100


def frame(data: bytes) -> Frame:
    return Frame("image/png", data, sha256(data).hexdigest())


class Requests(RuleBasedStateMachine):
    """Stateful test: requests come, fetch and keep frames, and go, in any order."""

    here = Bundle("here")

    def __init__(self) -> None:
        super().__init__()
        self.memory = MediaMemory(BYTES_MAX)
        self.kept: dict[MediaLease, set[bytes]] = {}
        self.arriving: dict[MediaLease, int] = {}

    @rule(target=here)
    def come(self) -> MediaLease:
        held = MediaLease(self.memory)
        self.kept[held], self.arriving[held] = set(), 0
        return held

    @rule(held=here, data=st.sampled_from([b"a" * 30, b"b" * 45, b"c" * 60, b""]), fetched=st.booleans())
    def keep(self, held: MediaLease, data: bytes, fetched: bool) -> None:
        if held not in self.kept:
            return
        room = BYTES_MAX - self.memory.held
        known = any(data in kept for kept in self.kept.values())
        if fetched:
            if not held.expect(len(data)):
                assert len(data) > room
                return
            kept = held.keep(frame(data), expected=len(data))
            assert kept is not None
        else:
            kept = held.keep(frame(data))
            assert (kept is not None) == (known or len(data) <= room)
        if kept is not None:
            self.kept[held].add(data)

    @rule(held=here, count=st.integers(0, 50))
    def expect(self, held: MediaLease, count: int) -> None:
        if held in self.kept and held.expect(count):
            self.arriving[held] += count

    @rule(held=here)
    def go(self, held: MediaLease) -> None:
        held.free()
        self.kept.pop(held, None)
        self.arriving.pop(held, None)

    @invariant()
    def what_is_held_is_what_those_here_have(self) -> None:
        distinct = {data for kept in self.kept.values() for data in kept}
        assert self.memory.held == sum(map(len, distinct)) + sum(self.arriving.values()) <= BYTES_MAX
        assert len(self.memory) == len(distinct)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=25, stateful_step_count=25)
