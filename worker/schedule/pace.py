"""How much prefill a step can take: what calls have cost, and what that allows.

A call of the engine that is w tokens wide, n tokens in all of its rows (padding included), at context c, is
taken to cost

    call + (w + further * (n - w)) * token + n * c * reach

seconds: `reach` is what makes chunks dearer as the context grows, and `further` what a token costs beside one
of another row. That is as much, 1, where tokens are what costs, and next to nothing where layers with a state
go from token to token, for all rows at once. The three prices are learned from the time of whole steps by
normalized least mean squares, which corrects each in proportion to its part in the prediction, so that short
calls say little of the price of long ones. What calls of several rows take says first of all what further
rows take. A measurement counts within limits: one that is far off, because something was compiled or the
machine was busy, neither stops prefill nor lets go of the target.

How far off predictions are is learned too: of a machine that is busy with other things less is asked, so that
all but a few steps keep to the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

CHUNK_TOKENS_MIN = 16
"""Run whatever it takes, so that prompts get on."""
PREFILL_SHARE_MIN = 0.3
"""Of what decoding takes, a step may spend so much on prefill even where the target leaves less: a machine on
which decoding alone takes the target would else run prompts in pieces so small that nothing but their calls
is paid for, and rows would come more slowly than they end."""
CHUNK_TOKENS_FIRST = 64
"""The most while nothing larger than a few tokens has been measured."""
GROWTH_MAX = 4
"""How many times the most tokens that were ever measured a step may take."""
IDLE_S = 1.0
"""What a step may take when nobody decodes: a cancel waits as long."""
CALLS_ALONE_MAX = 64
"""Behind so many calls of a single row it is tried what several take."""
_CHEAPER = 0.9
LATE_SHARE = 0.02
"""Of the steps with prefill, how many may take longer than the target."""

# A few sizes rather than any, for what is compiled or tuned by shape.
_SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Units in which work is of the order of one. The larger, the more of an error is put down to the call.
_TOKENS = 128
_REACH = 128 * 4096
_RATE = 0.5
_ERROR_BELOW, _ERROR_ABOVE = -0.5, 2.0
MARGIN_FIRST, MARGIN_MIN, MARGIN_MAX = 1.18, 1.05, 1.6
"""What a step may take over what was predicted: at the beginning, and the bounds."""
_MARGIN_STEP = 0.04


class Work(NamedTuple):
    """Prefill of one or more calls. `width`: the tokens of each call's longest row, summed. `reach`: each
    token times the tokens it looks back on, summed."""

    calls: int = 0
    width: int = 0
    tokens: int = 0
    reach: float = 0.0

    @classmethod
    def call(cls, rows: int, tokens: int, context: int) -> Work:
        """One call with so many tokens for each row, behind `context` tokens that are in the cache."""
        return cls(1, tokens, rows * tokens, rows * tokens * (context + tokens / 2))

    def plus(self, other: Work) -> Work:
        return Work(
            self.calls + other.calls,
            self.width + other.width,
            self.tokens + other.tokens,
            self.reach + other.reach,
        )


class Pace:
    """What is known of the engine's speed. Deterministic: measured seconds are handed in."""

    def __init__(self, *, target_s: float, tokens_max: int) -> None:
        """`target_s`: between two tokens of a running stream. `tokens_max`: of prefill in one step."""
        self.sizes = sorted({tokens_max, *(size for size in _SIZES if size < tokens_max)}, reverse=True)
        self._target_s = target_s
        self._tokens_max = tokens_max
        self._tokens_measured = 0
        self._prices = [0.0, 0.0, 0.0]
        self._further = 1.0
        """What a token of a further row costs, in tokens of a row that runs alone."""
        self._calls_alone = CALLS_ALONE_MAX
        self._decode_s = 0.0
        self._margin = MARGIN_FIRST
        """What steps take over what was predicted, but for `LATE_SHARE` of them."""

    @property
    def decode_s(self) -> float:
        """What decoding once takes; 0 while that was not measured."""
        return self._decode_s

    @decode_s.setter
    def decode_s(self, seconds: float) -> None:
        """It is known from elsewhere."""
        self._decode_s = seconds

    def seconds(self, work: Work) -> float:
        """What `work` will take; 0 while nothing was measured."""
        return sum(price * part for price, part in zip(self._prices, self._parts(work), strict=True))

    @property
    def is_curious(self) -> bool:
        """Whether what several rows take together was not measured for long, or never."""
        return self._calls_alone >= CALLS_ALONE_MAX

    def budget(self, *, decoding: bool) -> Budget:
        """What the next step may spend on prefill."""
        known_max = max(CHUNK_TOKENS_FIRST, GROWTH_MAX * self._tokens_measured)
        spare_s = self._target_s / self._margin - self._decode_s
        room_s = max(spare_s, PREFILL_SHARE_MIN * self._decode_s) if decoding else IDLE_S
        return Budget(self, room_s, min(self._tokens_max, known_max))

    def learn(self, seconds: float, *, decoded: bool, work: Work) -> None:
        """So long it took to do `work` and, if `decoded`, to decode once.

        Not to be told apart by whoever measures: in an engine that works ahead the prefill waits for the
        decode step before it, and the next decode step finds its tokens ready.
        """
        if work.calls:
            if decoded and self._tokens_measured:
                self._learn_margin(seconds / max(1e-9, self._decode_s + self.seconds(work)))
            self._learn_prefill(max(0.0, seconds - self._decode_s * decoded), work)
        elif decoded:
            expected = self._decode_s or seconds
            self._decode_s = expected + _RATE * _limited(seconds - expected, expected)

    def _learn_margin(self, ratio: float) -> None:
        # Up by a large step or down by a small one: it rests where one is as much as all of the other.
        is_late = ratio > self._margin
        margin = self._margin + _MARGIN_STEP * (is_late - LATE_SHARE)
        self._margin = min(max(margin, MARGIN_MIN), MARGIN_MAX)

    def _learn_prefill(self, seconds: float, work: Work) -> None:
        self._tokens_measured = max(self._tokens_measured, work.tokens)
        parts = self._parts(work)
        expected = self.seconds(work)
        if work.tokens == work.width:
            self._calls_alone += work.calls
        elif seconds > _CHEAPER * expected:  # else there is more to be found out at once
            self._calls_alone = 0
        if expected == 0.0:
            # All of it is put down to the tokens, which makes longer calls look dearer than they will be.
            self._prices = [0.0, seconds / parts[1], 0.0]
            return
        error = _RATE * _limited(seconds - expected, expected)
        step = (error - self._learn_further(error, work)) / sum(part * part for part in parts)
        self._prices = [
            max(0.0, price + step * part) for price, part in zip(self._prices, parts, strict=True)
        ]

    def _learn_further(self, error: float, work: Work) -> float:
        """Put a part of an error down to what further rows take, the larger the more of them there were; how
        many seconds that is."""
        rows = (work.tokens - work.width) / work.width
        whole = self._prices[1] * (work.tokens - work.width) / _TOKENS
        if whole <= 0.0:
            return 0.0
        before = self._further
        wished = before + error * rows * rows / (1 + rows * rows) / whole
        self._further = min(max(wished, 0.0), 1.0)
        return (self._further - before) * whole

    def _parts(self, work: Work) -> tuple[float, float, float]:
        # No call is cheaper than one of the smallest chunk: it has a price of its own, known already or not.
        tokens = work.width + self._further * (work.tokens - work.width)
        return work.calls, max(tokens, work.calls * CHUNK_TOKENS_MIN) / _TOKENS, work.reach / _REACH


@dataclass(slots=True)
class Budget:
    """What one step may spend on prefill, and what is spent of it."""

    pace: Pace
    room_s: float
    tokens_max: int
    spent: Work = field(default_factory=Work)

    def holds(self, work: Work) -> bool:
        """Whether there is time for this too."""
        total = self.spent.plus(work)
        return total.tokens <= self.tokens_max and self.pace.seconds(total) <= self.room_s

    def cut(self, left: int, context: int) -> int:
        """How many of a row's `left` tokens to run, behind `context`. The first call may be cut. 0: none."""
        if self.holds(Work.call(1, left, context)):
            return left
        if self.spent.calls:
            return 0
        for size in self.pace.sizes:
            if size < left and self.holds(Work.call(1, size, context)):
                return size
        return min(left, CHUNK_TOKENS_MIN, self.tokens_max)

    def spend(self, work: Work) -> None:
        self.spent = self.spent.plus(work)


def _limited(error: float, expected: float) -> float:
    return min(max(error, _ERROR_BELOW * expected), _ERROR_ABOVE * expected)
