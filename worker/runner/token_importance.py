"""Token importance for sparse prefill, by a small model that has read the prompt.

As in SpecPrefill (arXiv 2502.02789), the model generates a few tokens, and the prompt tokens that these
attend to are important. Upstream's layers do not expose their attention weights. But the output of an
attention head is the sum of all values, each times its attention weight, and caches return the values. So the
gradient of the generated token's logit by a value is that weight times the gradient by the head's output,
which is the same vector for all tokens. Its length is taken. A gradient by the attention scores, or by a
mask, would not do: it vanishes where the attention is saturated, which is where something is recalled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.runner.kv.batch import RowCaches, leaf_caches
from worker.runner.kv.sparse_rows import SkippingCache, each_positional

AHEAD_TOKENS = 8
"""Number of tokens generated."""
LEAST_SUM = 1e-30


class GradientProbeCache(SkippingCache):
    """A cache that exposes the gradient by its values. The gradient by `lengths`, zeros of [1, heads,
    columns], is the norm of the gradients by the values in these columns."""

    def __init__(self, cache: Any, lengths: mx.array) -> None:
        super().__init__(cache)
        vars(self)["_lengths"] = lengths

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        lengths: mx.array = vars(self)["_lengths"]
        keys, values = self._cache.update_and_fetch(keys, values)
        listened: Any = _listened(keys if _are_latents(keys, values) else values, lengths)
        return (listened, values) if _are_latents(keys, values) else (keys, listened)


def _are_latents(keys: mx.array, values: mx.array) -> bool:
    """Return whether this is latent attention: its “keys” hold the latents that keys and values of all heads
    are made of, its “values” only the positional part."""
    return keys.shape[1] == 1 and values.shape[-1] < keys.shape[-1]


@mx.custom_function
def _listened(values: mx.array, lengths: mx.array) -> mx.array:
    return values


@_listened.vjp
def _lengths_of(primals: Sequence[mx.array], slope: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    columns = primals[1].shape[-1]
    return slope, mx.linalg.norm(slope[..., :columns, :].astype(mx.float32), axis=-1)


def score_tokens(network: nn.Module, caches: RowCaches, last: int) -> mx.array:
    """Return the importance of each token in the caches, [columns] float32; the caches stay as they are.
    `last`: the token behind them. The weights of each generated token have the same sum.

    Sliding-window layers are ignored.
    """
    *_, weights = score_tokens_in_parts(network, caches, last)
    found: mx.array = weights
    return found


def score_tokens_in_parts(network: nn.Module, caches: RowCaches, last: int) -> Iterator[Any]:
    """As `score_tokens`, in parts of about two decode steps each, so that other work can run between them.
    Yields None for each part but the last, and then the weights."""
    rows = copy.deepcopy(caches)
    held = next(_whole(rows)).offset
    weights, token = mx.zeros(held), mx.array([[last]], mx.uint32)
    for left in reversed(range(AHEAD_TOKENS)):
        token, heads = attended_by(network, rows, token, held)
        lengths = heads.sum(axis=0)
        weights += lengths / mx.maximum(lengths.sum(), LEAST_SUM)
        mx.eval(weights, token, [cache.state for cache in rows])
        yield None if left else weights


def attended_by(network: nn.Module, rows: RowCaches, token: mx.array, held: int) -> tuple[mx.array, mx.array]:
    """Feed `token`; return the likeliest next one, [1, 1], and the norms of its logit's gradients by the
    values in the first `held` columns, [heads of all layers, columns]."""

    def said(lengths: list[mx.array]) -> tuple[mx.array, mx.array]:
        left = iter(lengths)
        given = each_positional(
            rows, lambda cache: cache if hasattr(cache, "max_size") else GradientProbeCache(cache, next(left))
        )
        logits = network(token, cache=given)[0, -1].astype(mx.float32)
        return logits.max(), mx.argmax(logits)

    silent = [mx.zeros((1, cache.keys_and_values()[1].shape[1], held)) for cache in _whole(rows)]
    (_, then), lengths = mx.value_and_grad(said)(silent)
    return then.reshape(1, 1), mx.concatenate(lengths, axis=1)[0]


def can_score_tokens(caches: RowCaches) -> bool:
    """Return whether some layer attends to the whole prompt; recurrent states give no importance."""
    return next(_whole(caches), None) is not None


def _whole(caches: RowCaches) -> Iterator[Any]:
    """Yield the caches that have a column of every token."""
    for cache in leaf_caches(caches):
        if hasattr(cache, "update_and_fetch") and not hasattr(cache, "max_size"):
            yield cache
