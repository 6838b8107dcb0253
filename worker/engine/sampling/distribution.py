"""What rows are drawn from: filters, temperature, and the randomness that a seed and a position give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from worker.contract import Draw
from worker.engine.sampling.ranking import BLOCK, blocks, exponential, leading, normalizer, nucleus

LEADING_MAX = 256
"""The largest top-k whose tokens are drawn from by themselves. A larger one masks the vocabulary, which costs
ten times as much, and keeps all equals at its bar."""

_WORD = 2**32
_GOLDEN = 0x9E3779B97F4A7C15


class Filters(NamedTuple):
    """Which filters a row asks for. `wide_top_k`: a top-k above `LEADING_MAX`."""

    top_p: bool
    min_p: bool
    top_k: bool
    wide_top_k: bool


def filters_of(draw: Draw) -> Filters:
    """The filters of a row that is not greedy."""
    is_wide = draw.top_k > LEADING_MAX
    return Filters(draw.top_p < 1, draw.min_p > 0, draw.top_k > 0 and not is_wide, is_wide)


class Distribution:
    """Draws tokens for rows that all ask for the same filters, each with its own parameters."""

    def __init__(self, filters: Filters, draws: Sequence[Draw]) -> None:
        self._filters = filters
        self._sharpness = _column([1 / draw.temperature for draw in draws])
        self._top_p = _column([draw.top_p for draw in draws])
        self._min_p = _column([math.log(draw.min_p) if draw.min_p > 0 else -math.inf for draw in draws])
        self._top_k = mx.array([[draw.top_k] for draw in draws], mx.int32)
        self._width = max(draw.top_k for draw in draws)

    def __call__(self, logits: mx.array, uniforms: mx.array) -> mx.array:
        """Tokens [rows] uint32 for `logits` [rows, vocabulary] float32 and `uniforms` [rows, 2] in (0, 1]."""
        if self._filters.top_k:
            tokens, values = self._leading(logits)
            index = _inverted(self._weights(values), uniforms[:, :1])
            return mx.take_along_axis(tokens, index, axis=-1)[:, 0]
        weights = self._weights(logits)
        for kept in self._kept(logits):
            weights = weights * kept
        # Two stages need no running sum over the vocabulary, which would lose the rare tokens to rounding.
        divided = blocks(weights, 0)
        block = _inverted(mx.sum(divided, axis=-1), uniforms[:, :1])
        within = _inverted(mx.take_along_axis(divided, block[:, :, None], axis=1)[:, 0], uniforms[:, 1:])
        return (block * BLOCK + within)[:, 0]

    def _weights(self, logits: mx.array) -> mx.array:
        return exponential((logits - mx.max(logits, axis=-1, keepdims=True)) * self._sharpness)

    def _leading(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """The likeliest tokens, as many as some row keeps, and their logits: -inf where a row drops one."""
        tokens, values = leading(logits, self._width)
        kept = mx.arange(values.shape[-1], dtype=mx.int32) < self._top_k
        if self._filters.top_p:
            masses = exponential(values - normalizer(logits))
            kept = kept & (mx.cumsum(masses, axis=-1, inclusive=False) < self._top_p)
        if self._filters.min_p:
            kept = kept & (values >= values[:, :1] + self._min_p)
        return tokens, mx.where(kept, values, -mx.inf)

    def _kept(self, logits: mx.array) -> Iterator[mx.array]:
        """Whether each filter keeps each token: bool. Equals at a filter's bar are all kept."""
        if self._filters.top_p:
            yield nucleus(logits, self._top_p)
        if self._filters.min_p:
            yield logits >= mx.max(logits, axis=-1, keepdims=True) + self._min_p
        if self._filters.wide_top_k:
            width = min(self._width, logits.shape[-1])
            ascending = mx.sort(mx.topk(logits, width, axis=-1), axis=-1)
            yield logits >= mx.take_along_axis(ascending, mx.maximum(width - self._top_k, 0), axis=-1)


def most_likely(logits: mx.array) -> mx.array:
    """Tokens [rows] uint32, as upstream's greedy sampler picks them.

    Upstream compares log-probabilities. In a 16-bit type the subtraction can round two different logits to
    one value, and the first of the two wins; in float32 it all but cannot, and is saved.
    """
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logits, axis=-1)


def mixed(value: int) -> int:
    """SplitMix64's finalizer: a bijection of 64 bits in which every bit of input moves half the output."""
    value = (value + _GOLDEN) % _WORD**2
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % _WORD**2
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % _WORD**2
    return value ^ (value >> 31)


def uniforms_at(mixed_seed: int, position: int) -> tuple[float, float]:
    """Two numbers in (0, 1], multiples of 2^-32, for a position. `mixed_seed`: the seed, `mixed`.

    SplitMix64 (Steele et al., 2014): the mixed seed is the start of a sequence, the position the step in it.
    For one seed no two positions share a key; for two seeds keys meet by a chance of 2^-64.
    """
    key = mixed((mixed_seed + position * _GOLDEN) % _WORD**2)
    high, low = divmod(key, _WORD)
    return (high + 1) / _WORD, (low + 1) / _WORD


def _inverted(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Indices [rows, 1] uint32 drawn in proportion to `weights` [rows, n], never one of weight 0."""
    # A parallel scan need not be monotone to the last bit, so the sums at weight 0 are not to be looked at.
    sums = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0)
    return mx.argmax(sums >= uniforms * mx.max(sums, axis=-1, keepdims=True), axis=-1, keepdims=True)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array([[value] for value in values], mx.float32)
