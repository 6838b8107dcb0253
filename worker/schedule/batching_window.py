"""Batching of bursts, of requests that reach an idle worker together. Pure.

The *batching window* is how long an idle worker waits for further requests after the one that woke it. The
*burst gate* then holds decoding until the prompts of a burst are prefilled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from worker.schedule.prefill_cost import PrefillCostModel, PrefillWork
from worker.schedule.rows import Row

WINDOW_ALONE_S = 0.001
WINDOW_RESUMED_S = 0.05
"""Window for a resumed request: all requests of a lost worker are resent together."""
OTHERS_WITHIN = 4
"""Requests that arrive within this many windows of an opening are a reason to wait next time."""

GATHERED_S = 1.5
"""Longest wait of the first row, in seconds."""
BURST_S = 0.25
"""Requests that arrive within this time after the first row started belong to its burst: sixteen chats take
0.2 s from the first to the last, and a short prompt or a stored prefix is ready sooner."""
EXPECTED_S_MAX = 5.0
"""Longest prefill that is waited for, as predicted. Prompts are predicted whole, although they may begin with
a stored prefix; and the first prices of a worker are too high."""


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


def gathers(coming: Sequence[Row], pace: PrefillCostModel, waited_s: float) -> bool:
    """Burst gate: return whether started rows without a token wait for the prompts of the rows in `coming`,
    which belong to their burst.

    Without it each started row rebuilds the batch, and prompts beside running streams are cut into chunks
    that keep to the inter-token target. With it the first rows wait at most `GATHERED_S`, no stream waits
    between two tokens, and all requests finish sooner.

    `waited_s`: seconds since the first of them started.
    """
    if not coming or any(row.images for row in coming):
        return False  # the time to encode an image is unknown
    left_s = pace.seconds(PrefillWork.call(len(coming), max(row.left for row in coming), 0))
    return waited_s < GATHERED_S and 0 < left_s <= EXPECTED_S_MAX
