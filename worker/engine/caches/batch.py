"""The caches of a batch of rows over all layers: rows join and leave, and every layer follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from worker.engine.caches.layers import Layer, StateLayer, batch_layer
from worker.engine.caches.positional import Order, PositionalLayer
from worker.engine.caches.seats import Seats
from worker.engine.caches.spans import NO_GAPS, Gaps

RowCaches = list[Any]
"""One cache per layer of a single row, of whatever classes upstream's model makes."""


def leaf_caches(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of a single row, those that a layer is made of one by one."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from leaf_caches(cache.caches)
        else:
            yield cache


class Batch:
    """Rows that decode together."""

    def __init__(self, like: RowCaches) -> None:
        """`like`: caches of a single row. Raises `ValueError` where a layer cannot be batched."""
        self._seats = Seats()
        self._layers: list[Layer] = [
            batch_layer(layer, partial(PositionalLayer, self._seats)) for layer in like
        ]
        self.caches: list[Any] = []
        """What the model is given, one cache per layer."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row has in its caches."""
        return self._seats.lengths

    def reseat(
        self,
        leaving: Sequence[int],
        joining: Sequence[RowCaches],
        lengths: Sequence[int],
        gaps: Sequence[Gaps] = (),
    ) -> Order:
        """Let rows go and others in; return who comes to sit where.

        `leaving`: places of rows. `lengths`: tokens that each joining row has in its caches. `gaps`: which
        were left out of each; empty: none of any.
        """
        old = len(self.lengths)
        order = arrange(old, leaving, len(joining))
        mx.eval([layer.lift(order, old) for layer in self._layers])
        everybody = [*zip(self.lengths, self._seats.gaps, strict=True)]
        everybody += zip(lengths, gaps or [NO_GAPS] * len(lengths), strict=True)
        self._seats.seat([everybody[row][0] for row in order], [everybody[row][1] for row in order])
        for index, layer in enumerate(self._layers):
            layer.reseat(order, old, [row[index] for row in joining])
        self.caches = [layer.cache for layer in self._layers]
        return order

    def advance(self) -> None:
        """A step has been dispatched: every row has got one token more."""
        self._seats.advance()
        for layer in self._layers:
            layer.make_room()

    def extract(self, row: int, fresh: RowCaches) -> RowCaches:
        """A row's own caches, detached from the batch. `fresh`: empty caches of a single row."""
        return [layer.extract(row, like) for layer, like in zip(self._layers, fresh, strict=True)]

    def columns(self, row: int, first: int, last: int) -> list[list[mx.array]]:
        """Of each layer that has them; see `PositionalLayer.columns`."""
        return [part.columns(row, first, last) for part in self._parts() if isinstance(part, PositionalLayer)]

    def states(self, row: int) -> list[Any]:
        """The state of a row in each other layer, as upstream's cache of a single row gives it out."""
        return [part.cache.extract(row).state for part in self._parts() if isinstance(part, StateLayer)]

    def _parts(self) -> list[Layer]:
        return [part for layer in self._layers for part in layer.parts()]

    @property
    def state(self) -> list[Any]:
        """What must be evaluated with each step, or it would grow lazily."""
        return [layer.state for layer in self._layers]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers as they are allocated; evaluates nothing."""
        return sum(layer.nbytes for layer in self._layers)


def arrange(rows: int, leaving: Sequence[int], joining: int) -> list[int]:
    """Who sits where when some of `rows` leave and `joining` come, moving as few as possible.

    Joining rows take the places that become free, then further ones; what is free still is closed by the last
    rows. Joining rows are numbered from `rows` on.
    """
    order = list(range(rows))
    coming = list(range(rows, rows + joining))
    free = sorted(leaving)
    while free and coming:
        order[free.pop(0)] = coming.pop(0)
    order += coming
    gone = set(free)
    for place in free:
        while order and order[-1] in gone:
            order.pop()
        if place < len(order):
            order[place] = order.pop()
    return order
