"""How much each token of a prompt matters to what is said next, by a small model that has read it.

What upstream's attention looks at stays inside it. But a mask is added to what it looks with, and masks are
handed out by the caches: how the likeliest continuation would change with the mask of a token is a gradient,
and tells how much that token is looked at, through all layers together. The continuation are a few tokens
that the model says itself, as in SpecPrefill (arXiv 2502.02789), which takes the attention instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from worker.engine.caches.batch import RowCaches, leaf_caches
from worker.engine.caches.gaps import Gapped, each_positional

AHEAD_TOKENS = 8
"""Of the continuation."""


class Weighted(Gapped):
    """A cache that hands out `bias` as a mask beside its own: [tokens, columns], the same in all layers."""

    def __init__(self, cache: Any, bias: mx.array) -> None:
        super().__init__(cache)
        vars(self)["_bias"] = bias

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """[tokens, columns]: what is added to the scores of attention."""
        bias: mx.array = vars(self)["_bias"]
        seen = create_causal_mask(N, self._cache.offset, window_size=window_size)
        return mx.where(seen, bias, mx.finfo(bias.dtype).min)


def weigh(network: nn.Module, caches: RowCaches, last: int) -> mx.array:
    """[columns] float32: the weight of each token in the caches, which are left as they are. `last`: the one
    behind them.

    Layers with windows have no part in it. Raises what upstream raises where a mask cannot be added.
    """
    *_, weights = weighing(network, caches, last)
    found: mx.array = weights
    return found


def weighing(network: nn.Module, caches: RowCaches, last: int) -> Iterator[Any]:
    """As `weigh`, in parts of about a step each, so that others can step between them: None for each but the
    last, which is the weights."""
    said, rows = [last], copy.deepcopy(caches)
    for _ in range(AHEAD_TOKENS):
        said.append(_said(network, rows, said[-1]))
        yield None
    del rows  # a copy of the caches is all that is needed at a time
    yield _slopes(network, caches, said)


def _slopes(network: nn.Module, caches: RowCaches, said: list[int]) -> mx.array:
    """[columns]: how the likelihood of what was said, behind the first, changes with each mask."""
    whole = next(_whole(caches))
    held, dtype = whole.offset, whole.keys_and_values()[1].dtype
    tokens = mx.array([said[:-1]], mx.uint32)

    def likelihood(bias: mx.array) -> mx.array:
        given = each_positional(
            copy.deepcopy(caches),
            lambda cache: cache if hasattr(cache, "max_size") else Weighted(cache, bias),
        )
        logits = network(tokens, cache=given)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.take_along_axis(logprobs, mx.array(said[1:])[:, None], axis=-1).sum()

    slopes = mx.grad(likelihood)(mx.zeros((AHEAD_TOKENS, held + AHEAD_TOKENS), dtype))
    return mx.abs(slopes[:, :held].astype(mx.float32)).mean(axis=0)


def _said(network: nn.Module, caches: RowCaches, last: int) -> int:
    """The likeliest token behind this one, which the caches have then read."""
    logits = network(mx.array([[last]], mx.uint32), cache=caches)
    token: Any = mx.argmax(logits[0, -1]).item()
    return int(token)


def can_weigh(caches: RowCaches) -> bool:
    """Whether a layer sees all of a prompt: of one that only has states nothing can be told."""
    return next(_whole(caches), None) is not None


def _whole(caches: RowCaches) -> Iterator[Any]:
    """Those that have a column of every token."""
    for cache in leaf_caches(caches):
        if hasattr(cache, "update_and_fetch") and not hasattr(cache, "max_size"):
            yield cache
