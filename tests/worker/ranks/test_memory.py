"""What ranks take is told by each, now and then, and known by the first one."""

from __future__ import annotations

from collections import deque

import msgspec

from protocol.parts import RankTaken, Resources, Taken
from worker.ranks import calls
from worker.ranks.memory import TELL_EVERY_S, Ledger, Telling


class Line:
    """Words of a rank, as they are decoded at the other end; and its clock."""

    def __init__(self) -> None:
        self.words: deque[calls.Word] = deque()
        self.now = 0.0

    def say(self, word: calls.Word, wait_s: float) -> bool:
        self.words.append(calls.decode_word(calls.encode(word)))
        return True

    def hear(self, wait_s: float) -> calls.Word | None:
        return self.words.popleft() if self.words else None


def device() -> Taken:
    return Resources(device_bytes=2, device_peak_bytes=3, device_spare_bytes=4, uptime_s=5.0)


def test_news_are_told_when_the_last_ones_are_old_and_nothing_else_is() -> None:
    line = Line()
    telling = Telling(1, line.say, device, lambda: line.now)
    telling.tell()
    telling.after(calls.Reset())
    assert len(line.words) == 1
    line.now += TELL_EVERY_S
    telling.after(None)
    assert len(line.words) == 2
    for _ in range(3):
        line.now += TELL_EVERY_S
        telling.after(None)
    assert len(line.words) == 2
    telling.after(calls.Reset())
    assert len(line.words) == 3


def test_the_last_word_of_each_rank_counts() -> None:
    line, now = Line(), [0.0]
    ledger = Ledger(line.hear)
    for rank in (2, 1):
        Telling(rank, line.say, device, lambda: now[0]).tell()
    ledger.await_all(2)
    one, two = ledger.read()
    assert (one.rank, two.rank) == (1, 2)
    assert one.resident_bytes > 2**20
    assert (one.device_bytes, one.device_peak_bytes, one.device_spare_bytes) == (2, 3, 4)
    later = msgspec.structs.replace(two, device_bytes=9)
    line.say(calls.Told(later), 0.0)
    line.say(calls.Here(1, "mac-1"), 0.0)
    assert ledger.read() == [one, later]
    assert isinstance(later, RankTaken)
