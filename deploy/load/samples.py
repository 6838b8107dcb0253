"""Measurements of one request, and their summary: percentiles and rates. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PERCENTS = (50, 90, 99)
ERROR_CHARS_MAX = 120


@dataclass(slots=True)
class Sample:
    """Measurements of one request, with times of one clock. Tokens are as counted by the server."""

    sent_at: float = 0.0
    pieces: list[float] = field(default_factory=list)
    """Arrival times of the pieces of text."""
    ended_at: float = 0.0
    text: str = ""
    """The complete text, reasoning included."""
    tokens: int = 0
    """0 if the server does not count them; then a piece is a token."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache, if the server reports them."""
    error: str = ""
    """Why the answer is incomplete."""

    def note(self, event: Mapping[str, Any], now: float) -> None:
        """Record one event of the stream."""
        if error := event.get("error"):
            self.error = f"{reason(error)} in the stream"
            return
        if usage := event.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self.tokens = usage.get("completion_tokens") or usage.get("output_tokens") or 0
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            # Servers that send reasoning under both names send the same text twice.
            texts = [delta[part] for part in ("content", "reasoning", "reasoning_content") if delta.get(part)]
            if texts or delta.get("tool_calls"):
                self.pieces.append(now)
                self.text += texts[0] if texts else ""

    @property
    def answered(self) -> int:
        return self.tokens or len(self.pieces)

    @property
    def first_s(self) -> float:
        """Time to the first piece."""
        return self.pieces[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Times between two pieces."""
        return [after - before for before, after in pairwise(self.pieces)]

    @property
    def per_token_s(self) -> float | None:
        """Mean time per token after the first piece."""
        behind = self.answered - 1
        return (self.pieces[-1] - self.pieces[0]) / behind if behind > 0 else None


def reason(error: Any) -> str:
    """Return the code of an error object, or else its message; of anything else its text."""
    if isinstance(error, Mapping):
        error = error.get("code") or error.get("message") or "error"
    return str(error)[:ERROR_CHARS_MAX]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Count, mean and percentiles of durations in seconds."""

    count: int
    mean: float
    at: dict[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Summarize durations; None if there are none."""
        if not values:
            return None
        return cls(
            len(values), sum(values) / len(values), {each: percentile(values, each) for each in PERCENTS}
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of many requests. Rates refer to the time from the first request to the last end."""

    requests: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_s: Spread | None
    gap_s: Spread | None
    per_token_s: Spread | None
    request_s: Spread | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_s(self) -> float:
        """Completed requests per second."""
        answered = self.requests - sum(self.errors.values())
        return answered / self.seconds if self.seconds else 0.0


Rounds = Mapping[str, Sequence[Summary]]
"""Rounds by the name of the side."""


def summarize(samples: Sequence[Sample]) -> Summary:
    """Summarize samples. Failed requests count only as errors and in the total time."""
    well = [sample for sample in samples if not sample.error and sample.pieces]
    ended = [sample.ended_at for sample in samples]
    per_token = [each for sample in well if (each := sample.per_token_s) is not None]
    return Summary(
        requests=len(samples),
        errors=dict(Counter(sample.error or "empty answer" for sample in samples if sample not in well)),
        seconds=max(ended) - min(sample.sent_at for sample in samples) if samples else 0.0,
        prompt_tokens=sum(sample.prompt_tokens for sample in well),
        cached_tokens=sum(sample.cached_tokens or 0 for sample in well),
        tokens=sum(sample.answered for sample in well),
        first_s=Spread.of([sample.first_s for sample in well]),
        gap_s=Spread.of([gap for sample in well for gap in sample.gaps]),
        per_token_s=Spread.of(per_token),
        request_s=Spread.of([sample.ended_at - sample.sent_at for sample in well]),
    )
