"""Batch caches of one layer, for whatever kind of layer upstream's model makes.

KV layers, which store something for each token, are ours (`positional`). All others keep a state of fixed
size that each step rewrites. There upstream's `merge`, `extend` and `filter` cost no more than a step, and
are used. The kind of a layer is found by its methods, never by its class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from worker.engine.caches.positional import Order, PositionalLayer
from worker.engine.caches.single import is_positional
from worker.engine.trees import arrays_of


class StateLayer:
    """A layer whose state has one size whatever the row's length, in upstream's own batch cache."""

    def __init__(self, like: Any) -> None:
        self._like = like
        self.cache: Any = None

    def copy_moving_rows(self, order: Order, old: int) -> list[mx.array]:
        """Return nothing: this layer needs no copies."""
        return []

    def rearrange(self, order: Order, old: int, joining: Sequence[Any]) -> None:
        """Rearrange the rows, as `PositionalLayer.rearrange`."""
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
        if len(order) != old or any(place != row < old for place, row in enumerate(order)):
            return False
        mine, theirs = arrays_of(self.cache.state), arrays_of(merged.state)
        if mine.keys() != theirs.keys():
            return False
        for place, row in enumerate(order):
            if row >= old:
                for name, whole in mine.items():
                    whole[place : place + 1] = theirs[name][row - old : row - old + 1]
        return True

    def make_room(self) -> None:
        """Do nothing: the state has a fixed size."""

    def extract(self, row: int, fresh: Any) -> Any:
        """Return a copy of a row as a cache of a single row."""
        # Rows that have been fed nothing have no state, and upstream cannot extract one.
        return fresh if self.cache.empty() else self.cache.extract(row)

    def parts(self) -> list[Layer]:
        """Return the layer itself, its only part."""
        return [self]

    @property
    def state(self) -> Any:
        return self.cache.state

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes)


class CompositeLayer:
    """Several caches that a model keeps for one layer."""

    def __init__(self, like: Any, positional: Build, state: Build) -> None:
        self._like = like
        self._parts = [batch_layer(part, positional, state) for part in like.caches]

    @property
    def cache(self) -> Any:
        """The cache that the model is given."""
        whole = copy.copy(self._like)
        whole.caches = tuple(part.cache for part in self._parts)
        return whole

    def copy_moving_rows(self, order: Order, old: int) -> list[mx.array]:
        """Copy the moving rows of every part."""
        return [leaf for part in self._parts for leaf in part.copy_moving_rows(order, old)]

    def rearrange(self, order: Order, old: int, joining: Sequence[Any]) -> None:
        """Rearrange the rows in every part."""
        for index, part in enumerate(self._parts):
            part.rearrange(order, old, [row.caches[index] for row in joining])

    def make_room(self) -> None:
        """Make room for the next token in every part."""
        for part in self._parts:
            part.make_room()

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


Layer = PositionalLayer | StateLayer | CompositeLayer
Build = Callable[[Any], Any]
"""Makes a layer's batch cache from a single row's cache."""


def batch_layer(like: Any, positional: Build, state: Build = StateLayer) -> Any:
    """Make the batch cache of a layer from a row's cache `like`: by `positional` for a KV cache, by `state`
    otherwise.

    Raises `ValueError` if it cannot be batched.
    """
    if hasattr(like, "caches"):
        return CompositeLayer(like, positional, state)
    if hasattr(like, "update_and_fetch"):
        if not is_positional(like):
            raise ValueError(f"{type(like).__name__} does not support rows of unequal lengths")
        return positional(like)
    if not all(hasattr(like, able) for able in ("merge", "extend", "filter", "extract")):
        raise ValueError(f"{type(like).__name__} cannot be merged, extended and filtered")
    return state(like)
