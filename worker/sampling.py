"""One sampler for a whole batch: every row by its own settings, in one pass.

A row's token depends on its logits, its settings, its seed and its position, and on nothing else: no state is
kept between calls, and no row sees another. The order is that of `mlx_lm.sample_utils.make_sampler`:
log-probabilities, then top-p, min-p and top-k, and only then the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from worker.contract import Draw

TEMPERATURE_MIN = 1e-5
"""Below it the most likely token is drawn: dividing by less leaves nothing else, or overflows."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Sampler:
    """Draws one token for each row of a batch. Built anew whenever the rows change."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        """`draws`: the settings of each row, in the order of the rows of the logits."""
        rows = [row for row, draw in enumerate(draws) if not _is_greedy(draw)]
        drawn = [draws[row] for row in rows]
        self._positions = rows
        self._seeds = [_mix(draw.seed) for draw in drawn]
        self._rows = None if len(rows) == len(draws) else mx.array(rows, mx.uint32)
        self._scale = _column([1 / draw.temperature for draw in drawn])
        self._min_p = _min_p_column(drawn)
        self._ranking = _Ranking(drawn) if any(_is_ranked(draw) for draw in drawn) else None

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Tokens [rows] uint32 for `logits` [rows, vocabulary], drawn at `positions` of the sequences.

        Lazy: nothing is evaluated. A row whose logits are not finite gets some token, the others theirs.
        """
        if not self._seeds:
            return _most_likely(logits)
        keys = mx.array(
            [_key(seed, positions[row]) for seed, row in zip(self._seeds, self._positions, strict=True)],
            mx.uint32,
        )
        if self._rows is None:
            return self._draw(logits, keys)
        tokens = _most_likely(logits)
        tokens[self._rows] = self._draw(logits[self._rows], keys)
        return tokens

    def _draw(self, logits: mx.array, keys: mx.array) -> mx.array:
        return mx.vmap(_categorical)(self.filtered(logits) * self._scale, keys)

    def filtered(self, logits: mx.array) -> mx.array:
        """Log-probabilities [rows that draw, vocabulary] float32, -inf where a filter drops the token.

        Each filter keeps what lies above some log-probability: together, what lies above the highest bar.
        """
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        bars = []
        if self._min_p is not None:
            bars.append(mx.max(logprobs, axis=-1, keepdims=True) + self._min_p)
        if self._ranking is not None:
            bars.append(self._ranking(logprobs))
        for bar in bars:
            logprobs = mx.where(logprobs < bar, -mx.inf, logprobs)
        return logprobs


class _Ranking:
    """Where top-p and top-k cut: both ask for the tokens in the order of their likelihood."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        ranked = [draw for draw in draws if _is_ranked(draw)]
        # Sorting a whole vocabulary costs ten times as much as finding its first few.
        self._width = max(draw.top_k for draw in ranked) if all(draw.top_k for draw in ranked) else None
        # A row that asks for neither keeps everything, whatever its neighbours ask for.
        self._off = None if len(ranked) == len(draws) else mx.array([[not _is_ranked(d)] for d in draws])
        # The mass above a token may round to 1 before the last token: "off" must be out of its reach.
        self._top_p = _column([draw.top_p if draw.top_p < 1 else math.inf for draw in draws])
        self._top_k = mx.array([[draw.top_k or 2**31 - 1] for draw in draws], mx.int32)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """The lowest log-probability kept in each row: [rows, 1]; equals at the bar are all kept."""
        vocabulary = logprobs.shape[-1]
        if self._width is not None and self._width < vocabulary:
            logprobs = mx.topk(logprobs, self._width, axis=-1)
        ordered = mx.sort(logprobs, axis=-1)[:, ::-1]
        mass_above = mx.cumsum(mx.exp(ordered), axis=-1, inclusive=False)
        within = mx.sum(mass_above < self._top_p, axis=-1, keepdims=True)
        kept = mx.clip(mx.minimum(within.astype(mx.int32), self._top_k), 1, None)
        bar = mx.take_along_axis(ordered, kept - 1, axis=-1)
        return bar if self._off is None else mx.where(self._off, -mx.inf, bar)


def _most_likely(logits: mx.array) -> mx.array:
    """Tokens [rows] uint32, as upstream's greedy sampler picks them.

    Upstream compares log-probabilities. In a 16-bit type the subtraction can round two different logits to
    one value, and the first of the two wins; in float32 it all but cannot, and is saved.
    """
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logits, axis=-1)


def _categorical(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)


def _key(mixed_seed: int, position: int) -> tuple[int, int]:
    """The threefry key of a position: two words of 32 bits.

    SplitMix64 (Steele et al., 2014): the mixed seed is the start of a sequence, the position the step in it.
    For one seed no two positions share a key; for two seeds keys meet by a chance of 2^-64.
    """
    mixed = _mix((mixed_seed + position * _GOLDEN) & _MASK)
    return mixed >> 32, mixed & 0xFFFFFFFF


def _mix(value: int) -> int:
    """SplitMix64's finalizer: a bijection of 64 bits in which every bit of input moves half the output."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_greedy(draw: Draw) -> bool:
    return draw.temperature < TEMPERATURE_MIN or draw.top_k == 1


def _is_ranked(draw: Draw) -> bool:
    return draw.top_p < 1 or draw.top_k > 0


def _min_p_column(draws: Sequence[Draw]) -> mx.array | None:
    if not any(draw.min_p for draw in draws):
        return None
    return _column([math.log(draw.min_p) if draw.min_p else -math.inf for draw in draws])


def _column(values: Sequence[float]) -> mx.array:
    return mx.array([[value] for value in values], mx.float32)
