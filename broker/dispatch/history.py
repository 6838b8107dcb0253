"""Metrics history for charts: one sample a second over the last minutes. Pure; the clock is injected.

A sample covers the time since the one before it: rates over that time, and means over its events, None if
there were none. All values are differences of existing totals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from broker.dispatch.fleet import Fleet
from broker.dispatch.flight import Flights
from broker.dispatch.traffic import Traffic

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


@dataclass(frozen=True, slots=True)
class _Totals:
    tokens: int = 0
    pieces: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: int = 0
    first_s: float = 0.0
    gaps: int = 0
    gap_s: float = 0.0

    @classmethod
    def of(cls, traffic: Traffic) -> _Totals:
        models = list(traffic.models.values())
        return cls(
            tokens=sum(model.tokens for model in models),
            pieces=sum(model.pieces for model in models),
            steps=sum(model.steps for model in models),
            prompt_tokens=sum(model.prompt_tokens for model in models),
            cached_tokens=sum(model.cached_tokens for model in models),
            first_tokens=sum(model.first_token_s.count for model in models),
            first_s=sum(model.first_token_s.sum for model in models),
            gaps=sum(model.inter_token_s.count for model in models),
            gap_s=sum(model.inter_token_s.sum for model in models),
        )


class MetricsHistory:
    """The samples, oldest first."""

    def __init__(self, traffic: Traffic, fleet: Fleet, flights: Flights) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self.taken = 0
        """Number of samples taken, including discarded ones."""
        self._traffic = traffic
        self._fleet = fleet
        self._flights = flights
        self._before = _Totals()
        self._sampled_at: float | None = None
        self._window: deque[tuple[float, _Totals]] = deque(maxlen=int(WINDOW_S / SAMPLE_S) + 1)
        """Totals of the samples in the window, with their times, and those just before it."""

    def since(self, taken: int) -> list[Sample]:
        """Return the retained samples after the first `taken`."""
        count = min(max(0, self.taken - taken), len(self.samples))
        return list(self.samples)[len(self.samples) - count :]

    def tick(self, now: float) -> None:
        """Take a sample if one is due. Call this more often than once a second."""
        if self._sampled_at is None:
            self._sampled_at, self._before = now, _Totals.of(self._traffic)
            self._window.append((now, self._before))
        elif now - self._sampled_at >= SAMPLE_S:
            self._take(now, now - self._sampled_at)

    def _take(self, now: float, passed_s: float) -> None:
        before, after = self._before, _Totals.of(self._traffic)
        beats = [worker.beat for worker in self._fleet if worker.beat is not None]
        told = [beat.resources for beat in beats if beat.resources is not None]
        running = sum(beat.running for beat in beats)
        firsts = sorted(seconds for at, seconds in self._traffic.first_tokens if at > now - WINDOW_S)
        start = self._enter_window(now, after)
        self.samples.append(
            Sample(
                at=now,
                tokens_per_s=round((after.tokens - before.tokens) / passed_s, 3),
                running=running,
                waiting=sum(beat.waiting for beat in beats) + len(self._flights.waiting()),
                batch=_share(after.pieces - before.pieces, after.steps - before.steps),
                time_to_first_token_s=_share(
                    after.first_s - before.first_s, after.first_tokens - before.first_tokens
                ),
                inter_token_s=_share(after.gap_s - before.gap_s, after.gaps - before.gaps),
                cache_hit_rate=_share(
                    after.cached_tokens - before.cached_tokens, after.prompt_tokens - before.prompt_tokens
                ),
                resident_bytes=sum(each.resident_bytes for each in told),
                device_bytes=sum(each.device_bytes for each in told),
                cache_bytes=sum(worker.cache_bytes for worker in self._fleet),
                first_token_p50_s=_percentile(firsts, 0.5),
                first_token_p95_s=_percentile(firsts, 0.95),
                cache_hit_rate_1m=_share(
                    after.cached_tokens - start.cached_tokens, after.prompt_tokens - start.prompt_tokens
                ),
            )
        )
        self.taken += 1
        self._sampled_at, self._before = now, after

    def _enter_window(self, now: float, totals: _Totals) -> _Totals:
        """Add totals to the window; return those of its start."""
        self._window.append((now, totals))
        while len(self._window) > 1 and self._window[1][0] <= now - WINDOW_S:
            self._window.popleft()
        return self._window[0][1]


def _percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest of the ascending `values` that at least `share` of them do not exceed."""
    return round(values[max(0, math.ceil(share * len(values)) - 1)], 4) if values else None


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None
