"""Memory usage of the ranks: reported by the followers, collected by the leader for its heartbeat."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import psutil

from protocol.common.footprint import footprint_bytes
from protocol.types import MemoryUsage, RankMemory
from worker.ranks import rpc

TELL_EVERY_S = 2.0
_SAY_S_MAX = 0.1
_HEARD_MAX = 64
"""Maximum number of messages read at once."""


class MemoryReporter:
    """Memory reporter of a follower. `send`: `FollowerLine.send`; `device`: returns MLX's memory usage."""

    def __init__(
        self,
        rank: int,
        send: Callable[[rpc.Word, float], bool],
        device: Callable[[], MemoryUsage],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._send = send
        self._device = device
        self._clock = clock
        self._process = psutil.Process()
        self._told_at = clock()
        self._has_news = False

    def after(self, call: rpc.Call | None) -> None:
        """Report if there were calls since the last report, at most every `TELL_EVERY_S` seconds. `call`: the
        call just executed, or None."""
        self._has_news = self._has_news or call is not None
        if self._has_news and self._clock() - self._told_at >= TELL_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Report now."""
        self._has_news, self._told_at = False, self._clock()
        device = self._device()
        taken = RankMemory(
            rank=self._rank,
            host=platform.node(),
            resident_bytes=int(self._process.memory_info().rss),
            footprint_bytes=footprint_bytes(),
            device_bytes=device.device_bytes,
            device_peak_bytes=device.device_peak_bytes,
            device_spare_bytes=device.device_spare_bytes,
        )
        self._send(rpc.MemoryReport(taken), _SAY_S_MAX)


class RankMemoryTable:
    """The followers' last reports, on the leader."""

    def __init__(self, hear: Callable[[float], rpc.Word | None]) -> None:
        """`hear`: returns the next message that comes within some seconds, if any."""
        self._hear = hear
        self._taken: dict[int, RankMemory] = {}

    def await_all(self, ranks: int) -> None:
        """Wait until `ranks` followers have reported, which each does after warming up."""
        while len(self._taken) < ranks:
            self._note(self._hear(_SAY_S_MAX))

    def read(self) -> list[RankMemory]:
        """Return the reports in the order of ranks, without blocking."""
        for _ in range(_HEARD_MAX):
            word = self._hear(0.0)
            if word is None:
                break
            self._note(word)
        return [self._taken[rank] for rank in sorted(self._taken)]

    def _note(self, word: rpc.Word | None) -> None:
        if isinstance(word, rpc.MemoryReport):
            self._taken[word.taken.rank] = word.taken
