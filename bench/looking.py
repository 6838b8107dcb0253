"""Ways to tell which tokens of a prompt matter, as `worker.engine.weighing` does, for comparison.

What an attention layer gives out is the sum of the values, each times the attention it is given. So the
gradient by a value, which the caches hand out, is that attention times how much the head's output matters:
its length, divided by the sum over all tokens, is the attention itself, heard without a hand in upstream.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from worker.engine.caches.batch import RowCaches
from worker.engine.caches.gaps import Gapped, each_positional
from worker.engine.weighing import AHEAD_TOKENS, _said, _whole, weigh

Way = Callable[[Any, RowCaches, int], mx.array]
Joint = Callable[[Sequence[mx.array]], mx.array]
_SMOOTHED = 13


class Nudged(Gapped):
    """A cache that hands out values to which something was added, [1, heads, columns, width]."""

    def __init__(self, cache: Any, nudge: mx.array) -> None:
        super().__init__(cache, 0)
        vars(self)["_nudge"] = nudge

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        nudge: mx.array = vars(self)["_nudge"]
        keys, values = self._cache.update_and_fetch(keys, values)
        return keys, values + mx.pad(nudge, [(0, 0), (0, 0), (0, values.shape[2] - nudge.shape[2]), (0, 0)])


def slopes(network: Any, caches: RowCaches, last: int, said: Sequence[int], *, of_logit: bool = False) -> Iterator[list[mx.array]]:
    """For each token ahead, and each layer: the lengths of the gradients by values, [heads, columns]."""
    rows = copy.deepcopy(caches)
    held = next(_whole(caches)).offset
    for token, then in zip(said, said[1:], strict=False):
        zeros = [mx.zeros_like(cache.keys_and_values()[1][:, :, :held]) for cache in _whole(rows)]

        def outcome(nudges: list[mx.array], token: int = token, then: int = then) -> mx.array:
            left = iter(nudges)
            given = each_positional(
                copy.deepcopy(rows), lambda cache: cache if hasattr(cache, "max_size") else Nudged(cache, next(left))
            )
            logits = network(mx.array([[token]], mx.uint32), cache=given)[0, -1].astype(mx.float32)
            return logits[then] - (0 if of_logit else mx.logsumexp(logits))

        found = mx.grad(outcome)(zeros)
        yield [mx.linalg.norm(each[0].astype(mx.float32), axis=-1) for each in found]
        network(mx.array([[token]], mx.uint32), cache=rows)


def attention(slope: mx.array) -> mx.array:
    return slope / mx.maximum(slope.sum(axis=-1, keepdims=True), 1e-30)


def smoothed(weights: mx.array) -> mx.array:
    half = _SMOOTHED // 2
    sums = mx.cumsum(mx.pad(weights, [(0, 0), (half + 1, half)]), axis=-1)
    return (sums[:, _SMOOTHED:] - sums[:, :-_SMOOTHED]) / _SMOOTHED
