"""Each rank reports its memory periodically, and the first rank records it."""

from __future__ import annotations

from collections import deque

import msgspec

from protocol.types import Resources
from worker.ranks import rpc
from worker.ranks.follower import TELL_EVERY_S, MemoryReporter
from worker.ranks.loader import RankMemoryTable


class Line:
    """A rank's messages, decoded at the other end, and its clock."""

    def __init__(self) -> None:
        self.words: deque[rpc.Word] = deque()
        self.now = 0.0

    def send(self, word: rpc.Word, wait_s: float) -> bool:
        self.words.append(rpc.decode_word(rpc.encode(word)))
        return True

    def receive(self, wait_s: float) -> rpc.Word | None:
        return self.words.popleft() if self.words else None


def test_news_are_told_when_the_last_ones_are_old_and_nothing_else_is() -> None:
    line = Line()
    telling = MemoryReporter(1, line.send, Resources, lambda: line.now)
    telling.tell()
    telling.after(rpc.Reset())
    assert len(line.words) == 1
    line.now += TELL_EVERY_S
    telling.after(None)
    assert len(line.words) == 2
    line.now += TELL_EVERY_S
    telling.after(None)
    assert len(line.words) == 2
    telling.after(rpc.Reset())
    assert len(line.words) == 3


def test_the_last_word_of_each_rank_counts() -> None:
    line, taken = Line(), Resources(device_bytes=2, device_peak_bytes=3, device_spare_bytes=4, uptime_s=5.0)
    ledger = RankMemoryTable(line.receive)
    for rank in (2, 1):
        MemoryReporter(rank, line.send, lambda: taken, lambda: line.now).tell()
    ledger.await_all(2)
    one, two = ledger.read()
    assert (one.rank, two.rank) == (1, 2)
    assert one.resident_bytes > 2**20
    assert (one.device_bytes, one.device_peak_bytes, one.device_spare_bytes) == (2, 3, 4)
    later = msgspec.structs.replace(two, device_bytes=9)
    line.send(rpc.MemoryReport(later), 0.0)
    line.send(rpc.RankUp(1, "mac-1"), 0.0)
    assert ledger.read() == [one, later]
