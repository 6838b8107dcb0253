"""What each rank's process takes: told by those that follow, kept by the first one for its heartbeat."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import psutil

from protocol.parts import RankTaken, Taken
from worker.ranks import calls

TELL_EVERY_S = 2.0
_SAY_S_MAX = 0.1
_HEARD_MAX = 64
"""Words in one go: ranks say few."""


class Telling:
    """Of a rank that follows: `say` is its line's, `device` what its arrays take."""

    def __init__(
        self,
        rank: int,
        say: Callable[[calls.Word, float], bool],
        device: Callable[[], Taken],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._say = say
        self._device = device
        self._clock = clock
        self._process = psutil.Process()
        self._told_at = clock()
        self._has_news = False

    def after(self, call: calls.Call | None) -> None:
        """Something was done, or nothing for a while: it is told if that is new, and not too often."""
        self._has_news = self._has_news or call is not None
        if self._has_news and self._clock() - self._told_at >= TELL_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """At once."""
        self._has_news, self._told_at = False, self._clock()
        device = self._device()
        taken = RankTaken(
            rank=self._rank,
            host=platform.node(),
            resident_bytes=int(self._process.memory_info().rss),
            device_bytes=device.device_bytes,
            device_peak_bytes=device.device_peak_bytes,
            device_spare_bytes=device.device_spare_bytes,
        )
        self._say(calls.Told(taken), _SAY_S_MAX)


class Ledger:
    """Of the first rank: what the others have told last. `hear` is its line's."""

    def __init__(self, hear: Callable[[float], calls.Word | None]) -> None:
        self._hear = hear
        self._taken: dict[int, RankTaken] = {}

    def await_all(self, ranks: int) -> None:
        """Until so many have told, which each does when it has been proven."""
        while len(self._taken) < ranks:
            self._note(self._hear(_SAY_S_MAX))

    def read(self) -> list[RankTaken]:
        """By rank. Never waits."""
        for _ in range(_HEARD_MAX):
            word = self._hear(0.0)
            if word is None:
                break
            self._note(word)
        return [self._taken[rank] for rank in sorted(self._taken)]

    def _note(self, word: calls.Word | None) -> None:
        if isinstance(word, calls.Told):
            self._taken[word.taken.rank] = word.taken
