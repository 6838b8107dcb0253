"""Bursts: requests that reach a worker together. Pure.

The *batching window* is how long an idle worker waits for further requests after the one that woke it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_ALONE_S = 0.001
WINDOW_RESUMED_S = 0.05
"""Window for a resumed request: all requests of a lost worker are resent together."""
OTHERS_WITHIN = 4
"""Requests that arrive within this many windows of an opening are a reason to wait next time."""

BURST_S = 0.25
"""Requests that arrive within this time after the first step of a burst belong to it: sixteen chats take
0.2 s from the first to the last. Arrivals are noticed between steps, so one counts as that of the start of
the step in which it came."""


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


@dataclass(slots=True)
class Bursts:
    """Numbers of bursts: which requests came together."""

    _burst: int = 0
    _stepped_at: float | None = None
    """End of the first step of burst `_burst`; None before."""
    _begun_at: float = 0.0
    """Start of the last step, which is the end of the one before."""
    _now: float = 0.0

    def arrived(self, now: float, *, idle: bool) -> int:
        """Record the arrival of a row; return the number of its burst.

        `idle`: whether no step was running. Otherwise it may have come at any time since the last one
        started, which can be longer ago than `BURST_S`.
        """
        came_at = now if idle else self._begun_at
        if self._stepped_at is not None and came_at - self._stepped_at > BURST_S:
            self._burst, self._stepped_at = self._burst + 1, None
        return self._burst

    def on_step_end(self, now: float, *, has_worked: bool) -> None:
        """Record the end of a step."""
        self._begun_at, self._now = self._now, now
        if self._stepped_at is None and has_worked:
            self._stepped_at = now
