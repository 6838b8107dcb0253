"""Write budget of the prefix cache: which items are worth a part of the disk's life, and how many. Pure.

Consumer SSDs are rated for 300 to 600 writes of their whole size. `DISK_SHARE` of the size a day is 91 such
writes in five years, less than a third of the lower figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker.core.prefix.eviction import is_superseded
from worker.core.prefix.tree import Item

DAY_S = 86_400.0
DISK_SHARE = 0.05
"""Share of the disk's size that may be written a day, if no setting says otherwise."""


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """Token bucket of `day_bytes`, written in any 24 hours at most: half of them are its burst, the other
    half refills it over a day.

    `debt`: bytes of the burst that are spent, at the Unix time `at`.
    """

    day_bytes: int
    debt: float = 0.0
    at: float = 0.0

    @property
    def burst(self) -> int:
        """The most bytes that can be left."""
        return self.day_bytes // 2

    @property
    def left(self) -> int:
        """Bytes that may be written at the time `at`."""
        return max(0, int(self.burst - self.debt))

    def refill(self, now: float) -> WriteBudget:
        """Return the budget at the time `now`. Where the clock was set back, nothing is refilled."""
        passed_s = max(0.0, now - self.at)
        return replace(self, debt=max(0.0, self.debt - passed_s * self.burst / DAY_S), at=now)

    def spend(self, file_bytes: int) -> WriteBudget | None:
        """Return the budget without `file_bytes`; None: it does not have them."""
        return None if file_bytes > self.left else replace(self, debt=self.debt + file_bytes)


def may_write(item: Item, file_bytes: int, left: int, burst: int, *, ends_turn: bool) -> bool:
    """Return whether to write an item that is in memory only, with `left` bytes of the budget.

    What was hit, or pinned, may take all that is left. What is new at the end of a turn, and what the disk
    has given up before, may only leave half of the burst. A superseded snapshot is never written.
    """
    if is_superseded(item):
        return False
    is_hit = item.uses > 0 or item.is_shared or item.is_pinned
    if is_hit and not item.left_disk:
        return file_bytes <= left
    return (is_hit or ends_turn) and file_bytes <= left - burst // 2
