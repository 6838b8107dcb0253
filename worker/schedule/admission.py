"""The admission window: how long an idle worker waits for others to share a batch with the request that woke
it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_ALONE_S = 0.001
OTHERS_WITHIN = 4
"""Windows after the opening of one in which others who arrive are a reason to wait the next time."""


@dataclass(slots=True)
class AdmissionWindow:
    """`window_s`: how long it is where others came soon after the last request that found nobody."""

    window_s: float
    _opened_at: float = -math.inf
    _expects_others: bool = True

    def arrived(self, now: float) -> None:
        """A request is here."""
        self._expects_others |= now - self._opened_at <= OTHERS_WITHIN * self.window_s

    def open(self, now: float) -> float:
        """How long the request that has found nobody waits: hardly, if the last such one stayed alone."""
        expects_others = self._expects_others
        self._opened_at, self._expects_others = now, False
        return self.window_s if expects_others else min(self.window_s, WINDOW_ALONE_S)
