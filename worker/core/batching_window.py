"""Batching window: how long an idle worker waits for further requests after the one that woke it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_ALONE_S = 0.001
"""Window in seconds after a request that stayed alone: what was sent at once arrives within it."""
WINDOW_RESUMED_S = 0.05
"""Window for a resumed request: all requests of a lost worker are resent together."""
OTHERS_WITHIN = 4
"""Requests that arrive within this many windows of an opening are a reason to wait next time."""


@dataclass(slots=True)
class BatchingWindow:
    """The window of one worker. `window_s`: its length if others followed the last lone request soon."""

    window_s: float
    _opened_at: float = -math.inf
    _expects_others: bool = True
    _resumes: bool = False

    def arrived(self, now: float, *, resumed: bool = False) -> None:
        """Record a request. `resumed`: another worker had started to answer it."""
        self._expects_others |= now - self._opened_at <= OTHERS_WITHIN * self.window_s
        self._resumes = resumed

    def open(self, now: float) -> float:
        """Return the seconds that a request to an idle worker waits.

        Hardly any if the last such request stayed alone; enough for all others if this one is resumed.
        """
        expects_others = self._expects_others
        self._opened_at, self._expects_others = now, False
        if self._resumes and self.window_s:
            return max(self.window_s, WINDOW_RESUMED_S)
        return self.window_s if expects_others else min(self.window_s, WINDOW_ALONE_S)
