"""Sampling distributions: top tokens, nucleus, filters, temperature, and random numbers by seed and position.

Every function treats each row separately, bit for bit: no result depends on the number of rows. Logits are
[rows, vocabulary] float32. A row that is not finite gets an arbitrary result; the others are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from worker.values import SamplingParams

BLOCK = 64
"""Tokens per block. A few times smaller or larger costs about the same."""

_MASS = 2**30 - 2**10
"""Fixed-point mass of all tokens of a row, with some headroom, because rounding may add to it."""

_LOW_WORD = 2**31 - 1


def exponential(values: mx.array) -> mx.array:
    """Return exp(`values`), to within 2e-6 of it where that matters. MLX's own takes twice as long on a
    CPU."""
    return mx.power(2.0, values * math.log2(math.e))


def normalizer(logits: mx.array) -> mx.array:
    """Return log(sum(exp(logits))) of each row: [rows, 1]."""
    peak = mx.max(logits, axis=-1, keepdims=True)
    return peak + mx.log(mx.sum(exponential(logits - peak), axis=-1, keepdims=True))


def blocks(values: mx.array, padding: float) -> mx.array:
    """Reshape [rows, vocabulary] to [rows, blocks, BLOCK], filling the last block with `padding`."""
    rows, length = values.shape
    if length % BLOCK:
        values = mx.pad(values, [(0, 0), (0, -length % BLOCK)], constant_values=padding)
    return values.reshape(rows, -1, BLOCK)


def leading(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the `count` likeliest tokens of each row in order, ties by id: (tokens uint32, logits).

    Returns fewer if the vocabulary has no more. The top `count` tokens are in the `count` blocks with the
    highest peaks: any other token is preceded by one of each of these blocks.
    """
    rows, length = logits.shape
    count = min(count, length)
    divided = blocks(logits, -math.inf)
    numbers = mx.arange(divided.shape[1], dtype=mx.int64)
    first = _positions(_last(_keys(mx.max(divided, axis=-1), numbers), count))
    tokens = (first[:, :, None] * BLOCK + mx.arange(BLOCK, dtype=mx.int64)).reshape(rows, -1)
    candidates = mx.take_along_axis(divided, first[:, :, None], axis=1).reshape(rows, -1)
    keys = mx.sort(_last(_keys(candidates, tokens), count), axis=-1)[:, ::-1]
    # Only a row of NaN can put the padding before a token.
    tokens = mx.minimum(_positions(keys), length - 1).astype(mx.uint32)
    return tokens, mx.take_along_axis(logits, tokens, axis=-1)


def nucleus(logits: mx.array, top_p: mx.array) -> mx.array:
    """Return whether each token is in the nucleus, the likeliest tokens with total mass `top_p`, [rows, 1]:
    bool. Tokens that tie with the last are all kept.

    Masses are integers of about 1e-9: their sums are exact in any order. Those below `floor` have together
    less than a nucleus leaves out, so it has none of them, and they are sorted as equals: a CPU takes half
    the time if most are.
    """
    weights = exponential(logits - mx.max(logits, axis=-1, keepdims=True))
    masses = (weights * (_MASS / mx.sum(weights, axis=-1, keepdims=True))).astype(mx.uint32)
    whole = mx.sum(masses, axis=-1, keepdims=True)
    enough = mx.maximum(whole.astype(mx.float32) * top_p, 1).astype(mx.uint32)
    enough = mx.minimum(enough, whole)  # rounding may exceed it
    floor = (whole - enough) // masses.shape[-1]
    ascending = mx.sort(mx.maximum(masses, floor), axis=-1)
    tails = mx.cumsum(ascending, axis=-1, reverse=True)
    last = mx.sum(tails >= enough, axis=-1, keepdims=True) - 1
    kept: mx.array = masses >= mx.take_along_axis(ascending, last, axis=-1)
    return kept


def _keys(logits: mx.array, positions: mx.array) -> mx.array:
    """Return int64 keys ordered as the logits, and among equal logits by position, the first the largest."""
    bits = (logits + 0.0).view(mx.int32)  # adding 0.0 turns -0.0 into 0.0
    # Larger negative floats have smaller bits: invert those, and keep the sign.
    ordered = bits ^ ((bits >> 31) & _LOW_WORD)
    return (ordered.astype(mx.int64) << 32) | (_LOW_WORD - positions)


def _positions(keys: mx.array) -> mx.array:
    return _LOW_WORD - (keys & _LOW_WORD)


def _last(keys: mx.array, count: int) -> mx.array:
    """Return the `count` largest keys, unordered; all if there are no more."""
    surplus = keys.shape[-1] - count
    return keys if surplus <= 0 else mx.partition(keys, surplus, axis=-1)[:, surplus:]


LEADING_MAX = 256
"""Largest top-k that samples from the top tokens alone. A larger one masks the vocabulary, which takes ten
times as long, and keeps all tokens that tie with the last."""

_WORD = 2**32
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Filters(NamedTuple):
    """The filters that a row needs. `wide_top_k`: a top-k above `LEADING_MAX`."""

    top_p: bool
    min_p: bool
    top_k: bool
    wide_top_k: bool


def filters_of(sampling: SamplingParams) -> Filters:
    """Return the filters of a row that is not greedy."""
    is_wide = sampling.top_k > LEADING_MAX
    return Filters(sampling.top_p < 1, sampling.min_p > 0, sampling.top_k > 0 and not is_wide, is_wide)


class Distribution:
    """Samples tokens for rows that need the same filters, each with its own parameters."""

    def __init__(self, filters: Filters, draws: Sequence[SamplingParams]) -> None:
        self._filters = filters
        self._sharpness = _column([1 / sampling.temperature for sampling in draws])
        self._top_p = _column([sampling.top_p for sampling in draws])
        self._min_p = _column(
            [math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf for sampling in draws]
        )
        self._top_k = mx.array([[sampling.top_k] for sampling in draws], mx.int32)
        self._width = max(sampling.top_k for sampling in draws)

    def __call__(self, logits: mx.array, uniforms: mx.array) -> mx.array:
        """Sample tokens, [rows] uint32, from `logits`, [rows, vocabulary] float32, and `uniforms`, [rows, 2]
        in (0, 1]."""
        if self._filters.top_k:
            tokens, values = self._leading(logits)
            index = _inverted(self._weights(values), uniforms[:, :1])
            return mx.take_along_axis(tokens, index, axis=-1)[:, 0]
        weights = self._weights(logits)
        for kept in self._kept(logits):
            weights = weights * kept
        # Two stages avoid a running sum over the vocabulary, in which rare tokens would be lost to rounding.
        divided = blocks(weights, 0)
        block = _inverted(mx.sum(divided, axis=-1), uniforms[:, :1])
        within = _inverted(mx.take_along_axis(divided, block[:, :, None], axis=1)[:, 0], uniforms[:, 1:])
        return (block * BLOCK + within)[:, 0]

    def _weights(self, logits: mx.array) -> mx.array:
        return exponential((logits - mx.max(logits, axis=-1, keepdims=True)) * self._sharpness)

    def _leading(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return the top tokens, as many as any row keeps, and their logits: -inf where a row drops one."""
        tokens, values = leading(logits, self._width)
        kept = mx.arange(values.shape[-1], dtype=mx.int32) < self._top_k
        if self._filters.top_p:
            masses = exponential(values - normalizer(logits))
            kept = kept & (mx.cumsum(masses, axis=-1, inclusive=False) < self._top_p)
        if self._filters.min_p:
            kept = kept & (values >= values[:, :1] + self._min_p)
        return tokens, mx.where(kept, values, -mx.inf)

    def _kept(self, logits: mx.array) -> Iterator[mx.array]:
        """Yield whether each filter keeps each token: bool. Ties at a threshold are all kept."""
        if self._filters.top_p:
            yield nucleus(logits, self._top_p)
        if self._filters.min_p:
            yield logits >= mx.max(logits, axis=-1, keepdims=True) + self._min_p
        if self._filters.wide_top_k:
            width = min(self._width, logits.shape[-1])
            ascending = mx.sort(mx.topk(logits, width, axis=-1), axis=-1)
            yield logits >= mx.take_along_axis(ascending, mx.maximum(width - self._top_k, 0), axis=-1)


def most_likely(logits: mx.array) -> mx.array:
    """Return the greedy tokens, [rows] uint32, as upstream's greedy sampler does.

    Upstream compares logprobs. In a 16-bit type the subtraction can round two different logits to one value,
    and the first of the two wins. In float32 that hardly happens, and the subtraction is saved.
    """
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logits, axis=-1)


def mixed(value: int) -> int:
    """Apply SplitMix64's finalizer: a bijection of 64 bits in which each input bit flips half of the output
    bits."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniforms_at(mixed_seed: int, position: int) -> tuple[float, float]:
    """Return two numbers in (0, 1], multiples of 2^-32, for a position. `mixed_seed`: the seed after `mixed`.

    SplitMix64 (Steele et al., 2014): the mixed seed starts a sequence, the position is the step in it. No two
    positions of a seed share a key; keys of two seeds collide with probability 2^-64.
    """
    key = mixed((mixed_seed + position * _GOLDEN) & _MASK)
    high, low = divmod(key, _WORD)
    return (high + 1) / _WORD, (low + 1) / _WORD


def _inverted(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Sample indices, [rows, 1] uint32, in proportion to `weights`, [rows, n]; never one of weight 0."""
    # A parallel scan may not be monotone to the last bit, so sums at weight 0 are ignored.
    sums = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0)
    return mx.argmax(sums >= uniforms * mx.max(sums, axis=-1, keepdims=True), axis=-1, keepdims=True)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array([[value] for value in values], mx.float32)
