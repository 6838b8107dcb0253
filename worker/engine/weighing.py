"""How much each token of a prompt matters to what is said next, by a small model that has read it.

As in SpecPrefill (arXiv 2502.02789): the model says a few tokens more, and what it looks at for these
matters. Its attention stays inside upstream's layers. But what a head of attention gives out is the sum of
all values, each times the attention that it has, and values are handed out by the caches. So the gradient
of what is said by a value is that attention times how much the head's output matters to it, one direction for
all tokens, whose length is taken. A gradient by the scores themselves, or by a mask, would not do: it
vanishes where the attention is sure of what it looks at, and that is where something is recalled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.caches.batch import RowCaches, leaf_caches
from worker.engine.caches.gaps import Gapped, each_positional

AHEAD_TOKENS = 8
"""Of the continuation."""
LEAST_SUM = 1e-30


class Heard(Gapped):
    """A cache of which is heard how its values are used: the gradient by `lengths`, zeros of [1, heads,
    columns], is how long those by the values in these columns are."""

    def __init__(self, cache: Any, lengths: mx.array) -> None:
        super().__init__(cache)
        vars(self)["_lengths"] = lengths

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As upstream's."""
        lengths: mx.array = vars(self)["_lengths"]
        keys, values = self._cache.update_and_fetch(keys, values)
        listened: Any = _listened(keys if _are_latents(keys, values) else values, lengths)
        return (listened, values) if _are_latents(keys, values) else (keys, listened)


def _are_latents(keys: mx.array, values: mx.array) -> bool:
    """Latent attention keeps as keys what both are made of, for all heads, and as values what only tells
    where a token stands."""
    return keys.shape[1] == 1 and values.shape[-1] < keys.shape[-1]


@mx.custom_function
def _listened(values: mx.array, lengths: mx.array) -> mx.array:
    return values


@_listened.vjp
def _lengths_of(primals: Sequence[mx.array], slope: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    columns = primals[1].shape[-1]
    return slope, mx.linalg.norm(slope[..., :columns, :].astype(mx.float32), axis=-1)


def weigh(network: nn.Module, caches: RowCaches, last: int) -> mx.array:
    """[columns] float32: the weight of each token in the caches, which are left as they are. `last`: the one
    behind them. Of each token said ahead, all weights together are the same.

    Layers with windows have no part in it.
    """
    *_, weights = weighing(network, caches, last)
    found: mx.array = weights
    return found


def weighing(network: nn.Module, caches: RowCaches, last: int) -> Iterator[Any]:
    """As `weigh`, in parts of about two steps each, so that others can step between: None for each but the
    last, which is the weights."""
    rows = copy.deepcopy(caches)
    held = next(_whole(rows)).offset
    weights, token = mx.zeros(held), mx.array([[last]], mx.uint32)
    for left in reversed(range(AHEAD_TOKENS)):
        token, heads = looked_at(network, rows, token, held)
        lengths = heads.sum(axis=0)
        weights += lengths / mx.maximum(lengths.sum(), LEAST_SUM)
        mx.eval(weights, token, [cache.state for cache in rows])
        yield None if left else weights


def looked_at(network: nn.Module, rows: RowCaches, token: mx.array, held: int) -> tuple[mx.array, mx.array]:
    """The likeliest token behind this one, [1, 1], which the caches have then read; and, [heads of all
    layers, columns], how long the gradients of its logit are by the values in the first columns."""

    def said(lengths: list[mx.array]) -> tuple[mx.array, mx.array]:
        left = iter(lengths)
        given = each_positional(
            rows, lambda cache: cache if hasattr(cache, "max_size") else Heard(cache, next(left))
        )
        logits = network(token, cache=given)[0, -1].astype(mx.float32)
        return logits.max(), mx.argmax(logits)

    silent = [mx.zeros((1, cache.keys_and_values()[1].shape[1], held)) for cache in _whole(rows)]
    (_, then), lengths = mx.value_and_grad(said)(silent)
    return then.reshape(1, 1), mx.concatenate(lengths, axis=1)[0]


def can_weigh(caches: RowCaches) -> bool:
    """Whether a layer sees all of a prompt: of one that only has states nothing can be told."""
    return next(_whole(caches), None) is not None


def _whole(caches: RowCaches) -> Iterator[Any]:
    """Those that have a column of every token."""
    for cache in leaf_caches(caches):
        if hasattr(cache, "update_and_fetch") and not hasattr(cache, "max_size"):
            yield cache
