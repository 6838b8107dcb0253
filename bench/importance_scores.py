"""Alternative token-importance scores, compared with `worker.runner.token_importance`."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from worker.core.sparse_prefill import SMOOTHED_TOKENS
from worker.runner.kv.batch import RowCaches, leaf_caches
from worker.runner.kv.sparse_rows import each_positional
from worker.runner.token_importance import AHEAD_TOKENS, LEAST_SUM, attended_by


def by_attention(network: Any, caches: RowCaches, last: int) -> mx.array:
    """Score tokens by attention, as SpecPrefill does (arXiv 2502.02789); returns [columns].

    A score is the smoothed attention of a few generated tokens: the maximum over heads and layers, averaged
    over these tokens. Heads that share their values are scored together.
    """
    rows, held = copy.deepcopy(caches), _held(caches)
    weights, token = mx.zeros(held), mx.array([[last]], mx.uint32)
    for _ in range(AHEAD_TOKENS):
        token, heads = attended_by(network, rows, token, held)
        attention = heads / mx.maximum(heads.sum(axis=-1, keepdims=True), LEAST_SUM)
        weights += _smoothed(attention).max(axis=0)
        mx.eval(weights, token, [cache.state for cache in rows])
    return weights


def _smoothed(weights: mx.array) -> mx.array:
    half = SMOOTHED_TOKENS // 2
    sums = mx.cumsum(mx.pad(weights, [(0, 0), (half + 1, half)]), axis=-1)
    return (sums[:, SMOOTHED_TOKENS:] - sums[:, :-SMOOTHED_TOKENS]) / SMOOTHED_TOKENS


def _held(caches: RowCaches) -> int:
    return max(cache.offset for cache in leaf_caches(caches) if hasattr(cache, "offset"))


class Weighted:
    """A cache that adds `bias` [tokens, columns] to its mask, the same in all layers."""

    def __init__(self, cache: Any, bias: mx.array) -> None:
        self._cache = cache
        self._bias = bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return [tokens, columns]: the values added to the attention scores."""
        seen = create_causal_mask(N, self._cache.offset, window_size=window_size)
        return mx.where(seen, self._bias, mx.finfo(self._bias.dtype).min)


def by_mask(network: Any, caches: RowCaches, last: int) -> mx.array:
    """Score tokens by gradient; returns [columns].

    A score is the gradient of the generated tokens' logprob with respect to the attention bias, over all
    layers. It vanishes where attention or the distribution is saturated.
    """
    said, held = _said(network, copy.deepcopy(caches), last), _held(caches)
    dtype = caches[-1].keys_and_values()[1].dtype

    def likelihood(bias: mx.array) -> mx.array:
        given = each_positional(copy.deepcopy(caches), lambda cache: Weighted(cache, bias))
        logits = network(mx.array([said[:-1]], mx.uint32), cache=given)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.take_along_axis(logprobs, mx.array(said[1:])[:, None], axis=-1).sum()

    slopes = mx.grad(likelihood)(mx.zeros((AHEAD_TOKENS, held + AHEAD_TOKENS), dtype))
    return mx.abs(slopes[:, :held].astype(mx.float32)).mean(axis=0)


def _said(network: Any, caches: RowCaches, last: int) -> list[int]:
    said = [last]
    for _ in range(AHEAD_TOKENS):
        token: Any = mx.argmax(network(mx.array([said[-1:]]), cache=caches)[0, -1]).item()
        said.append(int(token))
    return said
