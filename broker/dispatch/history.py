"""Metrics history for charts: one sample a second over the last minutes. Pure; the clock is injected.

A sample covers the time since the one before it: rates over that time, and means over its events, None if
there were none. All values come from the totals of figures over the models.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from broker.dispatch.figures import ModelFigures

SAMPLE_S = 1.0
SAMPLES_MAX = 300
WINDOW_S = 60.0
"""Time that percentiles and the windowed hit rate cover: most seconds have few requests, or none."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample. `batch`: mean number of requests with output in a step. `cache_hit_rate`: share of prompt
    tokens. Memory is the sum over all workers. `first_token_p50_s`, `first_token_p95_s` (times to first
    token) and `cache_hit_rate_1m` cover the last `WINDOW_S`."""

    at: float
    tokens_per_s: float
    running: int
    waiting: int
    batch: float | None
    time_to_first_token_s: float | None
    inter_token_s: float | None
    cache_hit_rate: float | None
    resident_bytes: int
    device_bytes: int
    cache_bytes: int
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    cache_hit_rate_1m: float | None


COLUMNS = tuple(field.name for field in fields(Sample))


_NOW = {
    "running": "requests_running",
    "waiting": "requests_waiting",
    "resident_bytes": "worker_resident_bytes",
    "device_bytes": "worker_device_bytes",
    "cache_bytes": "worker_cache_bytes",
}
"""Columns that are the total of a figure."""

_SHARES = {
    "batch": ("step_rows", "steps"),
    "time_to_first_token_s": ("time_to_first_token_sum", "time_to_first_token_count"),
    "inter_token_s": ("inter_token_sum", "inter_token_count"),
    "cache_hit_rate": ("cached_prompt_tokens", "prompt_tokens"),
}
"""Columns that are the growth of one total over that of another."""

Totals = Mapping[str, float]


class MetricsHistory:
    """The samples, oldest first."""

    def __init__(self, figures: ModelFigures) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self.taken = 0
        """Number of samples taken, including discarded ones."""
        self._figures = figures
        self._window: deque[tuple[float, Totals]] = deque(maxlen=int(WINDOW_S / SAMPLE_S) + 1)
        """Totals of the samples in the window, with their times, and those just before it."""

    def since(self, taken: int) -> list[Sample]:
        """Return the retained samples after the first `taken`."""
        count = min(max(0, self.taken - taken), len(self.samples))
        return list(self.samples)[len(self.samples) - count :]

    def tick(self, now: float) -> None:
        """Take a sample if one is due. Call this more often than once a second."""
        if not self._window:
            self._window.append((now, self._figures.totals()))
        elif now - self._window[-1][0] >= SAMPLE_S:
            self._take(now)

    def _take(self, now: float) -> None:
        sampled_at, before = self._window[-1]
        after = self._figures.totals()
        firsts = sorted(s for at, s in self._figures.traffic.first_tokens if at > now - WINDOW_S)
        self._enter_window(now, after)
        tokens = _growth("generation_tokens", before, after)
        values: dict[str, Any] = {column: after.get(name, 0) for column, name in _NOW.items()}
        values |= {column: _share(*names, before, after) for column, names in _SHARES.items()}
        self.samples.append(
            Sample(
                at=now,
                tokens_per_s=round(tokens / (now - sampled_at), 3),
                first_token_p50_s=_percentile(firsts, 0.5),
                first_token_p95_s=_percentile(firsts, 0.95),
                cache_hit_rate_1m=_share(*_SHARES["cache_hit_rate"], self._window[0][1], after),
                **values,
            )
        )
        self.taken += 1

    def _enter_window(self, now: float, totals: Totals) -> None:
        self._window.append((now, totals))
        while len(self._window) > 1 and self._window[1][0] <= now - WINDOW_S:
            self._window.popleft()


def _growth(name: str, before: Totals, after: Totals) -> float:
    return after.get(name, 0) - before.get(name, 0)


def _share(part: str, whole: str, before: Totals, after: Totals) -> float | None:
    """Return the growth of one total over that of another; None if that has not grown."""
    grown = _growth(whole, before, after)
    return round(_growth(part, before, after) / grown, 6) if grown else None


def _percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest of the ascending `values` that at least `share` of them do not exceed."""
    return round(values[max(0, math.ceil(share * len(values)) - 1)], 4) if values else None
