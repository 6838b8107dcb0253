"""Which tokens are the likeliest: the first few of a vocabulary, and its nucleus. Neither sorts all of it.

Everything here treats each row by itself, bit for bit: no row's answer depends on how many stand beside it.
Logits are [rows, vocabulary] float32. A row that is not finite gets some answer, the others theirs.
"""

from __future__ import annotations

import math

import mlx.core as mx

BLOCK = 64
"""Tokens to a block. A few times smaller or larger costs about the same."""

_MASS_BITS = 30
_MASS = 2**_MASS_BITS - 2**10
"""The fixed-point mass of all tokens of a row: a little room, because rounding may add to it."""

_LOW_WORD = 2**31 - 1


def exponential(values: mx.array) -> mx.array:
    """e to the `values`, to within 2e-6 of it where that matters. MLX's own takes twice as long on a CPU."""
    return mx.power(2.0, values * math.log2(math.e))


def normalizer(logits: mx.array) -> mx.array:
    """log(sum(exp(logits))) of each row: [rows, 1]."""
    peak = mx.max(logits, axis=-1, keepdims=True)
    return peak + mx.log(mx.sum(exponential(logits - peak), axis=-1, keepdims=True))


def blocks(values: mx.array, padding: float) -> mx.array:
    """[rows, vocabulary] -> [rows, blocks, BLOCK]; what the last block lacks is `padding`."""
    rows, length = values.shape
    if length % BLOCK:
        values = mx.pad(values, [(0, 0), (0, -length % BLOCK)], constant_values=padding)
    return values.reshape(rows, -1, BLOCK)


def leading(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` likeliest tokens of each row, the likeliest first, equals by id: (tokens uint32, logits).

    Fewer if the vocabulary has no more. The first `count` tokens lie in the `count` blocks with the highest
    peaks: for a token elsewhere, each of those blocks has one that goes before it.
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
    """Whether each token is among the likeliest that together have the mass `top_p` [rows, 1]: bool.

    The bar is found a bit at a time, from the highest, as the largest mass such that all tokens of at least
    that much have enough together; equals at the bar are all kept. Masses are integers of about 1e-9: their
    sums are exact in any order, and many times quicker than those of floats on a CPU.
    """
    weights = exponential(logits - mx.max(logits, axis=-1, keepdims=True))
    masses = (weights * (_MASS / mx.sum(weights, axis=-1, keepdims=True))).astype(mx.uint32)
    whole = mx.sum(masses, axis=-1, keepdims=True).astype(mx.float32)
    enough = mx.maximum(whole * top_p, 1).astype(mx.uint32)
    bar = mx.zeros_like(enough)
    for bit in reversed(range(_MASS_BITS)):
        trial = bar | (1 << bit)
        # The sum over max(mass, trial), less what is not above it: no selection, and it may wrap unharmed.
        below = mx.sum(masses < trial, axis=-1, keepdims=True).astype(mx.uint32)
        above = mx.sum(mx.maximum(masses, trial), axis=-1, keepdims=True) - trial * below
        bar = mx.where(above >= enough, trial, bar)
    kept: mx.array = masses >= bar
    return kept


def _keys(logits: mx.array, positions: mx.array) -> mx.array:
    """int64 that are ordered as the logits are, and equal logits by position, the first the largest."""
    bits = (logits + 0.0).view(mx.int32)  # the sum has one zero only
    # Of negative floats the larger has the smaller bits: turn those around, and keep the sign.
    ordered = bits ^ ((bits >> 31) & _LOW_WORD)
    return (ordered.astype(mx.int64) << 32) | (_LOW_WORD - positions)


def _positions(keys: mx.array) -> mx.array:
    return _LOW_WORD - (keys & _LOW_WORD)


def _last(keys: mx.array, count: int) -> mx.array:
    """The `count` largest, in no order; all if there are no more."""
    surplus = keys.shape[-1] - count
    return keys if surplus <= 0 else mx.partition(keys, surplus, axis=-1)[:, surplus:]
