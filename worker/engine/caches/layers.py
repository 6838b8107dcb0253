"""One layer's cache for a batch of rows, whatever kind of layer upstream's model makes.

Layers that keep something for each token are ours (`positional`). All others keep a state of fixed size,
which each step writes anew: there upstream's `merge`, `extend` and `filter` cost no more than a step, and are
used. What a layer is, is found by what it can do, never by its class.
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
    """A layer whose state has one size whatever the row's length, kept in upstream's own batch cache."""

    def __init__(self, like: Any) -> None:
        self._like = like
        self.cache: Any = None

    def lift(self, order: Order, old: int) -> list[mx.array]:
        """Nothing is written in place here."""
        return []

    def reseat(self, order: Order, old: int, joining: Sequence[Any]) -> None:
        """See `PositionalLayer.reseat`."""
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
        """Write the joining rows over those that have left, if that is all there is to do.

        A row's state is then all that is copied; `extend` and `filter` would copy everybody's, twice.
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
        """Nothing grows here."""

    def extract(self, row: int, fresh: Any) -> Any:
        """See `PositionalLayer.extract`."""
        # Of rows that nothing was fed yet there is no state, and upstream takes none out.
        return fresh if self.cache.empty() else self.cache.extract(row)

    def parts(self) -> list[Layer]:
        """See `CompositeLayer.parts`."""
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
        """See `PositionalLayer.cache`."""
        whole = copy.copy(self._like)
        whole.caches = tuple(part.cache for part in self._parts)
        return whole

    def lift(self, order: Order, old: int) -> list[mx.array]:
        """See `PositionalLayer.lift`."""
        return [leaf for part in self._parts for leaf in part.lift(order, old)]

    def reseat(self, order: Order, old: int, joining: Sequence[Any]) -> None:
        """See `PositionalLayer.reseat`."""
        for index, part in enumerate(self._parts):
            part.reseat(order, old, [row.caches[index] for row in joining])

    def make_room(self) -> None:
        """See `PositionalLayer.make_room`."""
        for part in self._parts:
            part.make_room()

    def extract(self, row: int, fresh: Any) -> Any:
        """See `PositionalLayer.extract`."""
        parts = zip(self._parts, fresh.caches, strict=True)
        fresh.caches = tuple(part.extract(row, like) for part, like in parts)
        return fresh

    def parts(self) -> list[Layer]:
        """The caches it is made of, however deep."""
        return [leaf for part in self._parts for leaf in part.parts()]

    @property
    def state(self) -> list[Any]:
        return [part.state for part in self._parts]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)


Layer = PositionalLayer | StateLayer | CompositeLayer
Build = Callable[[Any], Any]
"""Makes the batch of a layer of which it is given a row's cache."""


def batch_layer(like: Any, positional: Build, state: Build = StateLayer) -> Any:
    """The batch of a layer, by what a row's cache `like` can do: made by `positional` if it keeps something
    for each token, by `state` otherwise.

    Raises `ValueError` where it cannot be batched.
    """
    if hasattr(like, "caches"):
        return CompositeLayer(like, positional, state)
    if hasattr(like, "update_and_fetch"):
        if not is_positional(like):
            raise ValueError(f"{type(like).__name__} has no place for rows of unequal lengths")
        return positional(like)
    if not all(hasattr(like, able) for able in ("merge", "extend", "filter", "extract")):
        raise ValueError(f"{type(like).__name__} cannot be merged, extended and filtered")
    return state(like)
