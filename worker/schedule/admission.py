"""The admission window: how long an idle worker waits for others to share a batch with the request that woke
it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_ALONE_S = 0.001
WINDOW_RESUMED_S = 0.05
"""Who goes on with answers of a worker that has died does so together with all others of that one."""
OTHERS_WITHIN = 4
"""Windows after the opening of one in which others who arrive are a reason to wait the next time."""


@dataclass(slots=True)
class AdmissionWindow:
    """`window_s`: how long it is where others came soon after the last request that found nobody."""

    window_s: float
    _opened_at: float = -math.inf
    _expects_others: bool = True
    _resumes: bool = False

    def arrived(self, now: float, *, resumed: bool = False) -> None:
        """A request is here. `resumed`: another worker had begun to answer it."""
        self._expects_others |= now - self._opened_at <= OTHERS_WITHIN * self.window_s
        self._resumes = resumed

    def open(self, now: float) -> float:
        """How long the request that has found nobody waits: hardly, if the last such one stayed alone; long
        enough for all the others, if it is resumed."""
        expects_others = self._expects_others
        self._opened_at, self._expects_others = now, False
        if self._resumes and self.window_s:
            return max(self.window_s, WINDOW_RESUMED_S)
        return self.window_s if expects_others else min(self.window_s, WINDOW_ALONE_S)
