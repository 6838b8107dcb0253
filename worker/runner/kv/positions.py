"""Positions of a batch's rows, shared by its layers: offsets, columns to write to, and attention masks.

Each array is made once for a step, whatever the number of layers. Rows may be in several buckets: nearly all
of upstream's models attend through one function, `scaled_dot_product_attention`, by a name in their own
module. `route_attention` replaces it there by one that attends once for each bucket of `Bucketed` keys and
values; all other calls go on to upstream's. So a forward pass reads all weights once, whatever the lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as lm
from mlx_vlm.models import base as vlm

from worker.runner.kv.buckets import Bucket
from worker.runner.kv.sparse_rows import Gaps

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


class BatchPositions:
    """Positions of the rows, advanced by the batch."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Tokens in each row's caches."""
        self.gaps: list[Gaps] = []
        """Tokens skipped before these."""
        self.width = 1
        """Tokens that each row is fed in the current step, with padding."""
        self.step = 0
        """Number of steps begun."""
        self.buckets: list[Bucket] = []
        self.layout = Layout([])
        self._made: dict[Hashable, Any] = {}

    def arrange(self, lengths: list[int], gaps: list[Gaps], buckets: list[Bucket]) -> None:
        """Set the rows and their buckets."""
        self.gaps, self.buckets, self.layout = gaps, buckets, Layout(buckets)
        self.assign(lengths)

    def assign(self, lengths: list[int]) -> None:
        """Set the number of tokens in the caches."""
        self.lengths = lengths
        self._made.clear()

    def begin(self, width: int) -> None:
        """Begin a step that feeds each row `width` tokens."""
        self.width = width
        self.step += 1
        self._made.clear()

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # --- positions ---

    def next_positions(self) -> list[int]:
        """Return the position of each row's next token, skipped ones counted."""
        return [length + gaps.total for length, gaps in zip(self.lengths, self.gaps, strict=True)]

    @property
    def longest(self) -> int:
        """The largest position of a row's next token."""
        return max(self.next_positions())

    def offset(self, *, behind: bool) -> Any:
        """Return the position of each row's next token, [rows] int32, of a single row a number. `behind`: of
        that behind the step."""
        return self._once(("offset", behind), lambda: self._offset(self.width if behind else 0))

    def _offset(self, add: int) -> Any:
        found = [at + add for at in self.next_positions()]
        return found[0] if len(found) == 1 else mx.array(found, mx.int32)

    # --- columns ---

    def seat(self, row: int) -> tuple[Bucket, int]:
        """Return a row's bucket and slot."""
        return next((each, each.rows.index(row)) for each in self.buckets if row in each.rows)

    def common_column(self, bucket: Bucket, columns: int) -> int | None:
        """Return the column that the step's first token of all rows of a bucket is written to; None: they
        differ, or the tokens do not fit behind it."""

        def find() -> int | None:
            lengths = {self.lengths[row] for row in bucket.rows}
            first = min(lengths) % columns
            return first if len(lengths) == 1 and first + self.width <= columns else None

        found: int | None = self._once(("common", bucket, columns), find)
        return found

    def places(self, bucket: Bucket, columns: int) -> mx.array:
        """Return the column that each of the step's tokens is written to, [slots, 1, width, 1] int32."""

        def make() -> mx.array:
            starts = [self.lengths[row] for row in bucket.rows]
            starts += [0] * (bucket.slots - len(starts))
            places = mx.array(starts, mx.int32)[:, None] + mx.arange(self.width)
            return (places % columns)[:, None, :, None]

        made: mx.array = self._once((bucket, columns), make)
        return made

    def seen(self, bucket: Bucket, columns: int) -> int:
        """Return how many columns some row of a bucket attends to in the step."""
        end: int = self._once(("end", bucket), lambda: max(self.lengths[row] for row in bucket.rows))
        return min(end + self.width, columns)

    # --- masks ---

    def mask(self, window: int | None, ring: int | None) -> Any:
        """Return the step's mask; see `KVLayer.make_mask`. `ring`: columns at which slots wrap around."""
        return self._once(("mask", window, ring), lambda: self._mask(window, ring))

    def _mask(self, window: int | None, ring: int | None) -> Any:
        masks = [self._mask_of(bucket, window, ring) for bucket in self.buckets]
        if self.layout.is_plain:
            return masks[0]
        return None if all(mask is None for mask in masks) else Bucketed(self.layout, masks)

    def _mask_of(self, bucket: Bucket, window: int | None, ring: int | None) -> mx.array | None:
        """Return a bucket's mask, [rows, 1, width, columns] bool; None if all true."""
        lengths = [self.lengths[row] for row in bucket.rows]
        end, width = max(lengths) + self.width, self.width
        columns = min(bucket.columns, ring or end)
        is_whole = width == 1 and min(lengths) == max(lengths) and end <= columns
        lows = self._lows(bucket, window)
        if is_whole and max(low for row in lows for low in row) <= 0:
            return None
        starts = mx.array(lengths, mx.int32)[:, None, None, None]
        places, asking = mx.arange(min(end, columns)), starts + mx.arange(width)[:, None]
        if end > columns:  # the last position up to the step's end that each column can hold
            last = starts + (width - 1)
            places = last - (last - places) % columns
        mask = places <= asking
        if window is None:
            return mask
        return mask & (places >= mx.maximum(mx.array(lows, mx.int32)[:, None, :, None], 0))

    def _lows(self, bucket: Bucket, window: int | None) -> list[list[int]]:
        """Return the first column that each of the step's tokens attends to, [rows, width]. A window counts
        positions, skipped ones as well."""
        if window is None:
            return [[0]]
        return [self._lows_of(row, window) for row in bucket.rows]

    def _lows_of(self, row: int, window: int) -> list[int]:
        length, gaps = self.lengths[row], self.gaps[row]
        ends = range(length + 1, length + 1 + self.width)
        if not gaps.spans:
            return [end - window for end in ends]
        return [end - gaps.columns(end + gaps.total - window, end + gaps.total) for end in ends]
