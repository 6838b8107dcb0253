"""Batch caches of one layer, for whatever kind of layer upstream's model makes.

KV layers, which store something for each token, are ours (`kv_layer`). All others are upstream's: states of
fixed size that each step rewrites, so that `merge`, `extend` and `filter` cost no more than a step, and
caches that keep more than keys and values, for which a few families bring a batch class of their own.
The kind of a layer is found by its methods, never by its class.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from worker.runner.kv.buckets import Order
from worker.runner.kv.kv_layer import KVLayer
from worker.runner.kv.positions import BatchPositions
from worker.runner.kv.single import grows, is_positional, is_split, state_of
from worker.runner.trees import arrays_of


class StateLayer:
    """A layer in upstream's own batch cache: mostly a state that has one size whatever the row's length.

    A state cannot be shortened: of rows that were fed more than they keep, it is rolled back to before the
    step.
    """

    def __init__(self, like: Any) -> None:
        """`like`: a row's cache. Raises `ValueError` if upstream has no batch cache of its kind."""
        if not hasattr(like, "merge"):
            raise ValueError(f"{type(like).__name__} cannot be merged, extended and filtered")
        self._like = like
        self._before: Any = None
        self.cache: Any = None
        """The cache that the model is given."""

    # --- called for each step ---

    def begin(self, counts: Sequence[int]) -> None:
        """Begin a step that feeds each row `counts` tokens, padded on the right, and may be reverted."""
        self._before = self.checkpoint()
        width = max(counts)
        if min(counts) < width:  # steps without padding are faster
            self.cache.prepare(lengths=list(counts), right_padding=[width - count for count in counts])

    def finish(self) -> None:
        """Finish a dispatched step."""
        self.cache.finalize()

    def checkpoint(self) -> Any:
        """Return a checkpoint for `rollback`."""
        return tree_map(lambda leaf: leaf, self.cache.state)  # a copy: the list itself is written to

    def rollback(self, saved: Any) -> None:
        """Roll all rows back to a checkpoint."""
        self.cache.state = saved

    def revert(self, rows: Sequence[bool]) -> None:
        """Roll the chosen rows back to before the step."""
        if any(rows):
            chosen = mx.array(list(rows))
            self.cache.state = tree_map(partial(_chosen, chosen), self._before, self.cache.state)
        self._before = None

    # --- called when rows change ---

    def rearrange(self, order: Order, old: int, joining: Sequence[Any]) -> None:
        """Rearrange the rows, of which there were `old`."""
        if joining:
            merged = self._like.merge(list(joining))
            if not old:
                self.cache = merged
            elif self._replace(order, old, merged):
                return
            else:
                self.cache.extend(merged)
        if list(order) != list(range(old + len(joining))):
            self.cache.filter(mx.array(list(order), mx.int32))

    def _replace(self, order: Order, old: int, merged: Any) -> bool:
        """Overwrite the rows that have left with the joining ones, if that suffices.

        Only the states of those rows are copied; `extend` and `filter` would copy the states of all rows,
        twice.
        """
        if (
            grows(self._like)
            or len(order) != old
            or any(place != row < old for place, row in enumerate(order))
        ):
            return False
        mine, theirs = arrays_of(self.cache.state), arrays_of(merged.state)
        if mine.keys() != theirs.keys():
            return False
        for place, row in enumerate(order):
            if row >= old:
                for name, whole in mine.items():
                    whole[place : place + 1] = theirs[name][row - old : row - old + 1]
        return True

    def extract(self, row: int, fresh: Any) -> Any:
        """Copy a row into a cache of a single row; the copy keeps nothing of the batch alive."""
        return extracted(self.cache, row, fresh)

    def state_of(self, row: int) -> Any:
        """Return a row's state, as `single.state_of` returns that of a single row."""
        return state_of(extracted(self.cache, row, self._like))

    def parts(self) -> list[Layer]:
        """Return the layer itself, its only part."""
        return [self]

    @property
    def state(self) -> Any:
        return self.cache.state

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes)


def extracted(batch: Any, row: int, empty: Any) -> Any:
    """Copy a row out of upstream's batch cache. `empty`: a cache of such a row that was fed nothing, which is
    returned where the batch was not either: from that upstream cannot extract."""
    if hasattr(batch, "caches"):
        whole = copy.copy(empty)
        parts = zip(batch.caches, empty.caches, strict=True)
        whole.caches = tuple(extracted(part, row, like) for part, like in parts)
        return whole
    if hasattr(batch, "empty") and batch.empty():
        return empty
    own = batch.extract(row)
    own.state = tree_map(_copied, own.state)  # upstream returns views
    return own


def _copied(leaf: Any) -> Any:
    return mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf


def _chosen(rows: mx.array, before: Any, after: Any) -> Any:
    if not isinstance(after, mx.array):
        return after
    # Upstream merges rows without a state as zeros.
    known = mx.zeros_like(after) if before is None else before
    return mx.where(rows.reshape(-1, *[1] * (after.ndim - 1)), known, after)


class CompositeLayer:
    """Several caches that a model keeps for one layer."""

    def __init__(self, positions: BatchPositions, like: Any) -> None:
        self._like = like
        self._parts = [batch_layer(positions, part) for part in like.caches]

    @property
    def cache(self) -> Any:
        """The cache that the model is given."""
        whole = copy.copy(self._like)
        whole.caches = tuple(part.cache for part in self._parts)
        return whole

    def extract(self, row: int, fresh: Any) -> Any:
        """Copy a row into `fresh`, part by part."""
        parts = zip(self._parts, fresh.caches, strict=True)
        fresh.caches = tuple(part.extract(row, like) for part, like in parts)
        return fresh

    def parts(self) -> list[Layer]:
        """Return the caches that it is made of, at any depth."""
        return [leaf for part in self._parts for leaf in part.parts()]

    @property
    def state(self) -> list[Any]:
        return [part.state for part in self._parts]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)


Layer = KVLayer | StateLayer | CompositeLayer


def batch_layer(positions: BatchPositions, like: Any) -> Layer:
    """Make the batch cache of a layer from a row's cache `like`.

    Raises `ValueError` if it cannot be batched.
    """
    if is_positional(like):
        return KVLayer(positions, like)
    if is_split(like):
        return CompositeLayer(positions, like)
    if hasattr(like, "keys_and_values"):  # mlx-lm's own kinds, which its batch classes do not have
        raise ValueError(f"{type(like).__name__} does not support rows of unequal lengths")
    return StateLayer(like)
