"""Attention over rows in several buckets: one call of upstream's attention for each.

Nearly all of upstream's models attend through one function, `scaled_dot_product_attention`, by a name in
their own module. `route_attention` replaces it there by one that recognizes `Bucketed` keys and values; all
other calls go on to upstream's. So a forward pass reads all weights once, whatever the rows' lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as lm
from mlx_vlm.models import base as vlm

from worker.runner.kv.buckets import Bucket

_NAME = "scaled_dot_product_attention"
_UPSTREAM = {getattr(lm, _NAME), getattr(vlm, _NAME)}


class Layout:
    """Where the rows of a batch are: the buckets, and the rows of each in arrays of the whole batch."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._rows = [_selector(bucket.rows) for bucket in buckets]
        self._with_spare = {
            bucket: mx.array([*bucket.rows, *[bucket.rows[0]] * (bucket.slots - len(bucket.rows))])
            for bucket in buckets
            if bucket.slots > len(bucket.rows)
        }
        self._index = {bucket: index for index, bucket in enumerate(buckets)}
        order = [row for bucket in buckets for row in bucket.rows]
        self._is_ordered = order == list(range(len(order)))
        self._places = None if self._is_ordered else mx.argsort(mx.array(order, mx.int32))
        self.is_plain = len(buckets) == 1 and self._is_ordered
        """Whether one bucket has all rows, in the order of the batch."""

    def select(self, whole: mx.array, bucket: Bucket | int, *, spare: bool = False) -> mx.array:
        """Return a bucket's rows of an array of the batch, in the order of its slots. `spare`: with arbitrary
        rows for its empty slots."""
        if spare and bucket in self._with_spare:
            return whole[self._with_spare[bucket]]
        index = bucket if isinstance(bucket, int) else self._index[bucket]
        return whole if self.is_plain else whole[self._rows[index]]

    def join(self, parts: Sequence[mx.array]) -> mx.array:
        """Return the array of the batch, of which `parts` are the rows of each bucket."""
        whole = parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
        return whole if self._places is None else whole[self._places]


class Bucketed(list[Any]):
    """Keys, values or masks of each bucket of a batch. No array: models that compute with it raise."""

    def __init__(self, layout: Layout, parts: Sequence[Any]) -> None:
        super().__init__(parts)
        self.layout = layout


def _selector(rows: Sequence[int]) -> slice | mx.array:
    """Return an index of `rows`; a slice, without a copy, if they are contiguous."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return mx.array(list(rows), mx.int32)


def route_attention(network: nn.Module) -> None:
    """Have the modules that a network's classes come from attend through `_attend`."""
    names = {kind.__module__ for part in network.modules() for kind in type(part).__mro__}
    for module in [sys.modules[name] for name in names if name in sys.modules]:
        upstream: Any = getattr(module, _NAME, None)
        if upstream in _UPSTREAM:
            setattr(module, _NAME, partial(_attend, upstream))


def _attend(
    upstream: Callable[..., mx.array],
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    *rest: Any,
    **named: Any,
) -> mx.array:
    if not isinstance(keys, Bucketed):
        return upstream(queries, keys, values, cache, *rest, **named)
    if rest:
        named |= dict(zip(("scale", "mask", "sinks"), rest, strict=False))
    masks = named.pop("mask", None)
    if masks is None:
        masks = [None] * len(keys)
    elif not isinstance(masks, Bucketed):
        raise TypeError("a mask of all rows cannot be used bucket by bucket")
    layout = keys.layout
    parts = [
        upstream(layout.select(queries, index), *pair, cache, mask=mask, **named)
        for index, (*pair, mask) in enumerate(zip(keys, values, masks, strict=True))
    ]
    return layout.join(parts)
