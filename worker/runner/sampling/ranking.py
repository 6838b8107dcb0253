"""Top tokens of a vocabulary, and its nucleus.

Every function treats each row separately, bit for bit: no result depends on the number of rows. Logits are
[rows, vocabulary] float32. A row that is not finite gets an arbitrary result; the others are not affected.
"""

from __future__ import annotations

import math

import mlx.core as mx

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
