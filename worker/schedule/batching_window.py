"""Batching of bursts, of requests that reach an idle worker together. Pure.

The *batching window* is how long an idle worker waits for further requests after the one that woke it. The
*burst gate* then holds decoding until the prompts of a burst are prefilled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from worker.schedule.prefill_cost import PrefillCall, PrefillCostModel
from worker.schedule.rows import Row

WINDOW_ALONE_S = 0.001
WINDOW_RESUMED_S = 0.05
"""Window for a resumed request: all requests of a lost worker are resent together."""
OTHERS_WITHIN = 4
"""Requests that arrive within this many windows of an opening are a reason to wait next time."""

GATHERED_S, GATHERED_ROW_S, GATHERED_S_MAX = 5.0, 2.0, 30.0
"""Longest wait of a burst's first row, in seconds: at least, for each row of the burst, and at most. Prompts
that run beside decoding rows take smaller calls, where each call reads all weights, and the rows decode in
smaller batches. So the more rows there are, the more time it saves to run all prompts first: all answers end
sooner, and of the first texts only the early ones come later (`bench.schedules`)."""
BURST_S = 0.25
"""Requests that arrive within this time after the first step of a burst, or after its first row started,
belong to it: sixteen chats take 0.2 s from the first to the last. Arrivals are noticed between steps, so one
counts as that of the start of the step in which it came."""


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
class BurstGate:
    """Burst gate of one scheduler: whether rows that have started wait for the others of their burst.

    Without it each started row rebuilds the batch, and prompts beside running streams are cut into chunks
    that keep to the inter-token target. With it the first rows wait for a bounded time, no stream waits
    between two tokens, and all requests finish sooner.
    """

    wait_s_max: float = GATHERED_S_MAX
    """Longest wait of the first row, however many rows there are."""
    _first_at: float | None = None
    """When the first row started; None until the end of that step."""
    _last: int = -1
    """Arrival number of the burst's last row."""
    _burst: int = 0
    _stepped_at: float | None = None
    """End of the first step of burst `_burst`; None before."""
    _begun_at: float = 0.0
    """Start of the last step, which is the end of the one before."""
    _now: float = 0.0

    def started(self, last: int) -> None:
        """Record that the first row has started. `last`: arrival number of the last row so far."""
        self._first_at, self._last = None, last

    def arrived(self, number: int, now: float, *, idle: bool) -> int:
        """Record the arrival of a row, whether others wait for it or not; return the number of its burst.

        `idle`: whether no step was running. Otherwise it may have come at any time since the last one
        started, which can be longer ago than `BURST_S`.
        """
        came_at = now if idle else self._begun_at
        if self._first_at is None or came_at - self._first_at <= BURST_S:
            self._last = number
        if self._stepped_at is not None and came_at - self._stepped_at > BURST_S:
            self._burst, self._stepped_at = self._burst + 1, None
        return self._burst

    def on_step_end(self, now: float, *, has_worked: bool) -> None:
        """Record the time. Waiting is counted from the end of the step in which the first row started."""
        self._begun_at, self._now = self._now, now
        if self._first_at is None:
            self._first_at = now
        if self._stepped_at is None and has_worked:
            self._stepped_at = now

    def awaited(
        self,
        started: Sequence[Row],
        coming: Iterable[Row],
        left: Callable[[Row], int],
        pace: PrefillCostModel,
    ) -> Row | None:
        """Return the first row of `coming` that `started` rows without a token wait for; None: they decode.

        They wait for rows of their burst only, for those whose prompts fit into the longest wait: of a burst
        that is too large, the first prompts are gathered. `left`: returns how many tokens of a row's prompt
        are to run.
        """
        burst = [row for row in coming if row.queue_key[1] <= self._last]
        if not burst or any(row.images for row in burst):
            return None  # the time to encode an image is unknown
        # A resumed stream pauses meanwhile, before a client's eyes.
        row_s = 0.0 if any(row.request.resume for row in (*started, *burst)) else GATHERED_ROW_S
        wait_s_max = min(self.wait_s_max, max(GATHERED_S, row_s * (len(started) + len(burst))))
        waited_s = 0.0 if self._first_at is None else self._now - self._first_at
        next_s = pace.seconds([PrefillCall(left(burst[0]), 0)])
        fits = waited_s + next_s <= wait_s_max
        return burst[0] if next_s > 0 and fits and waited_s < wait_s_max else None
