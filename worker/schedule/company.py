"""Whether an idle worker waits for others to share a batch with the request that woke it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_ALONE_S = 0.001
COMPANY_WITHIN = 4
"""Windows after its beginning in which others count as company."""


@dataclass(slots=True)
class Company:
    """`window_s`: how long is waited where others came soon after the last request that found nobody."""

    window_s: float
    _alone_since: float = -math.inf
    _expected: bool = True

    def came(self, now: float) -> None:
        """A request is here."""
        self._expected |= now - self._alone_since <= COMPANY_WITHIN * self.window_s

    def window(self, now: float) -> float:
        """How long the request that has found nobody waits: hardly, if the last such one stayed alone."""
        expected = self._expected
        self._alone_since, self._expected = now, False
        return self.window_s if expected else min(self.window_s, WINDOW_ALONE_S)
