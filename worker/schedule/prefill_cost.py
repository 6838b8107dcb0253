"""Prefill cost model, and the token budget of a step that follows from it.

A call of the engine that is w tokens wide, n tokens in all of its rows (padding included), at context c, is
estimated to cost

    call + (w + further * (n - w)) * token + n * c * reach

seconds. `reach` makes chunks costlier as the context grows. `further` is the relative cost of a further row's
token: 1 if the cost is per token, near 0 if recurrent layers go token by token for all rows at once. The
three prices are learned from the duration of whole steps by normalized least mean squares. It corrects each
price in proportion to its part in the prediction, so short calls say little about long ones. Calls of several
rows correct `further` first. The error of a measurement is clipped, so that an outlier (compilation, a busy
machine) neither stops prefill nor makes steps exceed the target.

The error of predictions is learned too: on a busy machine the budget shrinks, so that all but a few steps
keep to the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CHUNK_TOKENS_MIN = 16
"""Minimum chunk: run at any cost, so that prompts make progress."""
PREFILL_SHARE = 3.0
"""Time for prefill in a step, as a multiple of its decode time, even if the target leaves less. A decode step
takes little longer for many rows than for one, so it pays to start rows soon: where decoding alone takes the
target, requests complete in half of the time that a multiple of 0.3 gives them (`bench.schedules`)."""
CALL_SHARE = 5.0
"""The same as a multiple of the shortest decode step. A call reads all weights, as that step does, before it
computes anything: in less time it would spend more than a fifth on that."""
PREFILL_SHARE_MIN = 1.0
"""The same where decode steps are so long that the maximum gap leaves less."""
PAUSES_MAX = 3
"""Maximum number of steps without prefill in which the first decode step is measured."""
CHUNK_TOKENS_FIRST = 64
"""Maximum tokens per step until a larger step has been measured."""
GROWTH_MAX = 4
"""Maximum tokens per step, as a multiple of the largest step measured."""
IDLE_S = 1.0
"""Time budget of a step when no row decodes: a cancel waits as long."""
LATE_SHARE = 0.02
"""Share of the steps with prefill that may exceed the target."""

# Few distinct sizes, because kernels are compiled or tuned by shape.
_SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Units that scale work to about one. The larger they are, the more of an error is attributed to the call.
_TOKENS = 128
_REACH = 128 * 4096
_RATE = 0.5
_ERROR_BELOW, _ERROR_ABOVE = -0.5, 2.0
_DECODE_ERROR_ABOVE = 0.5
"""Smaller, because a decode time that is too long gives prefill several times as much."""
MARGIN_FIRST, MARGIN_MIN, MARGIN_MAX = 1.18, 1.05, 1.6
"""Ratio of measured to predicted step time that is allowed for: initial value and bounds."""
_MARGIN_STEP = 0.04


class PrefillWork(NamedTuple):
    """Prefill work of one or more calls. `width`: sum of the tokens of each call's longest row. `reach`: sum
    of the tokens that each token attends to."""

    calls: int = 0
    width: int = 0
    tokens: int = 0
    reach: float = 0.0

    @classmethod
    def call(cls, rows: int, tokens: int, context: int) -> PrefillWork:
        """Create the work of a call with `tokens` tokens per row, after `context` tokens in the cache."""
        return cls(1, tokens, rows * tokens, rows * tokens * (context + tokens / 2))

    def plus(self, other: PrefillWork) -> PrefillWork:
        return PrefillWork(
            self.calls + other.calls,
            self.width + other.width,
            self.tokens + other.tokens,
            self.reach + other.reach,
        )


class PrefillCostModel:
    """Learned cost of prefill and decoding. Deterministic: the caller passes in measured seconds."""

    def __init__(self, *, target_s: float, tokens_max: int, gap_s_max: float = math.inf) -> None:
        """`target_s`: between two tokens of a running stream. `tokens_max`: prefill tokens in one step.
        `gap_s_max`: bound of a gap where decode steps take so long that prefill exceeds the target."""
        self.sizes = sorted({tokens_max, *(size for size in _SIZES if size < tokens_max)}, reverse=True)
        self._target_s, self._gap_s_max = target_s, max(target_s, gap_s_max)
        self._tokens_max = tokens_max
        self._tokens_measured = 0
        self._prices = [0.0, 0.0, 0.0]
        self._further = 1.0
        """Cost of a further row's token, in tokens of a row that runs alone."""
        self.rows = 0
        """Number of rows that decode now."""
        self._decode_times: dict[int, float] = {}
        """Seconds of a decode step, by size class of rows (`_class`)."""
        self._pauses = 0
        self._margin = MARGIN_FIRST
        """Upper bound of measured over predicted time, for all but `LATE_SHARE` of the steps."""

    @property
    def decode_s(self) -> float:
        """Seconds of a decode step of `rows` rows, or of the nearest number measured; 0 without any."""
        known, wanted = self._decode_times, _class(self.rows)
        return known[min(known, key=lambda each: abs(each - wanted))] if known else 0.0

    @decode_s.setter
    def decode_s(self, seconds: float) -> None:
        """Set the seconds of a decode step that was measured elsewhere."""
        self._decode_times[_class(self.rows)] = seconds

    def seconds(self, work: PrefillWork) -> float:
        """Return the predicted seconds of `work`; 0 until something has been measured."""
        return sum(price * part for price, part in zip(self._prices, self._parts(work), strict=True))

    @property
    def is_rough(self) -> bool:
        """Whether only short calls were measured, whose tokens look dearer, and a longer one is possible."""
        longer = PrefillWork.call(1, 2 * CHUNK_TOKENS_FIRST, 0)
        return self._tokens_measured <= CHUNK_TOKENS_FIRST and self.seconds(longer) <= IDLE_S

    def pauses_prefill(self) -> bool:
        """Return whether to run the next decode step without prefill, because none has been measured.

        In a burst every decode step may have prefill beside it, for many seconds. True at most `PAUSES_MAX`
        times.
        """
        if self._decode_times or not self._tokens_measured or self._pauses >= PAUSES_MAX:
            return False
        self._pauses += 1
        return True

    def budget(self, *, decoding: bool) -> PrefillBudget:
        """Return the prefill budget of the next step."""
        known_max = max(CHUNK_TOKENS_FIRST, GROWTH_MAX * self._tokens_measured)
        return PrefillBudget(self, self._room_s() if decoding else IDLE_S, min(self._tokens_max, known_max))

    def _room_s(self) -> float:
        """Return the seconds for prefill beside a decode step."""
        decode_s = self.decode_s
        worth_s = max(PREFILL_SHARE * decode_s, CALL_SHARE * min(self._decode_times.values(), default=0.0))
        bounded_s = min(worth_s, self._gap_s_max / self._margin - decode_s)
        return max(self._target_s / self._margin - decode_s, PREFILL_SHARE_MIN * decode_s, bounded_s)

    def learn(self, seconds: float, *, decoded: bool, work: PrefillWork) -> None:
        """Record the seconds that `work` and, if `decoded`, one decode step took together.

        The two cannot be measured separately: in a pipelined engine prefill waits for the decode step before
        it, and the next decode step finds its tokens ready.
        """
        if work.calls:
            if decoded and self._tokens_measured:
                self._learn_margin(seconds / max(1e-9, self.decode_s + self.seconds(work)))
            self._learn_prefill(max(0.0, seconds - self.decode_s * decoded), work)
        elif decoded:
            expected = self._decode_times.get(_class(self.rows), seconds)
            error = min(seconds - expected, _DECODE_ERROR_ABOVE * expected)
            self._decode_times[_class(self.rows)] = expected + _RATE * error

    def _learn_margin(self, ratio: float) -> None:
        # Large steps up, small steps down: it settles at the quantile where both balance.
        is_late = ratio > self._margin
        margin = self._margin + _MARGIN_STEP * (is_late - LATE_SHARE)
        self._margin = min(max(margin, MARGIN_MIN), MARGIN_MAX)

    def _learn_prefill(self, seconds: float, work: PrefillWork) -> None:
        self._tokens_measured = max(self._tokens_measured, work.tokens)
        parts = self._parts(work)
        expected = self.seconds(work)
        if expected == 0.0:
            # All is attributed to the tokens, which overestimates longer calls.
            self._prices = [0.0, seconds / parts[1], 0.0]
            return
        error = _RATE * _limited(seconds - expected, expected)
        self._correct(error - self._learn_further(error, work), parts)

    def _correct(self, error: float, parts: Sequence[float]) -> None:
        """Attribute an error in seconds to the prices, in proportion to their parts.

        What would make a price negative is attributed to the others. Otherwise the price of a call, which
        follows errors first, would hide that tokens are priced too high.
        """
        free = {index for index, part in enumerate(parts) if part}
        while free:
            step = error / sum(parts[index] ** 2 for index in free)
            negative = {index for index in free if self._prices[index] + step * parts[index] < 0.0}
            for index in negative or free:
                after = max(0.0, self._prices[index] + step * parts[index])
                error -= (after - self._prices[index]) * parts[index]
                self._prices[index] = after
            free = free - negative if negative else set()

    def _learn_further(self, error: float, work: PrefillWork) -> float:
        """Attribute a part of an error to further rows, larger the more there were; return it in seconds."""
        rows = (work.tokens - work.width) / work.width
        whole = self._prices[1] * (work.tokens - work.width) / _TOKENS
        if whole <= 0.0:
            return 0.0
        before = self._further
        wished = before + error * rows * rows / (1 + rows * rows) / whole
        self._further = min(max(wished, 0.0), 1.0)
        return (self._further - before) * whole

    def _parts(self, work: PrefillWork) -> tuple[float, float, float]:
        # No call counts as cheaper than the smallest chunk: a call has a price, even if not learned yet.
        tokens = work.width + self._further * (work.tokens - work.width)
        return work.calls, max(tokens, work.calls * CHUNK_TOKENS_MIN) / _TOKENS, work.reach / _REACH


@dataclass(slots=True)
class PrefillBudget:
    """Prefill budget of one step, and what is spent of it."""

    pace: PrefillCostModel
    room_s: float
    tokens_max: int
    spent: PrefillWork = field(default_factory=PrefillWork)

    def holds(self, work: PrefillWork) -> bool:
        """Return whether the budget has room for `work` too."""
        total = self.spent.plus(work)
        return total.tokens <= self.tokens_max and self.pace.seconds(total) <= self.room_s

    def chunk_length(self, left: int, context: int) -> int:
        """Return how many of a row's `left` tokens to run after `context`; 0 if they do not fit.

        Only the first call of a step is cut to a smaller size.
        """
        if self.holds(PrefillWork.call(1, left, context)):
            return left
        if self.spent.calls:
            return 0
        for size in self.pace.sizes:
            if size < left and self.holds(PrefillWork.call(1, size, context)):
                return size
        return min(left, CHUNK_TOKENS_MIN, self.tokens_max)

    def spend(self, work: PrefillWork) -> None:
        self.spent = self.spent.plus(work)


def _class(rows: int) -> int:
    """Return the size class of a number of rows: those of one bit length are taken to cost the same."""
    return rows.bit_length()


def _limited(error: float, expected: float) -> float:
    return min(max(error, _ERROR_BELOW * expected), _ERROR_ABOVE * expected)
