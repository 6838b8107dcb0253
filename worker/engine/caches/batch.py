"""Batch cache over all layers: rows join and leave, and every layer follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from worker.engine.caches.layers import Layer, StateLayer, batch_layer
from worker.engine.caches.positional import BatchPositions, Order, PositionalLayer
from worker.engine.caches.spans import NO_GAPS, Gaps

RowCaches = list[Any]
"""One cache per layer of a single row, of whatever classes upstream's model makes."""

Chunks = Mapping[str, Sequence[int]]


def leaf_caches(caches: Iterable[Any]) -> Iterator[Any]:
    """Yield the caches of a single row, with composite ones split into their parts."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from leaf_caches(cache.caches)
        else:
            yield cache


class CacheBatch:
    """The KV caches of rows that decode together."""

    def __init__(self, like: RowCaches, slack: int = 0) -> None:
        """`like`: caches of a single row. `slack`: see `BatchPositions`. Raises `ValueError` if a layer
        cannot be batched."""
        self._positions_of_rows = BatchPositions(slack)
        self._layers: list[Layer] = [
            batch_layer(layer, partial(PositionalLayer, self._positions_of_rows)) for layer in like
        ]
        self.caches: list[Any] = []
        """The caches that the model is given, one per layer."""

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each row's caches."""
        return self._positions_of_rows.lengths

    def rearrange(
        self,
        leaving: Sequence[int],
        joining: Sequence[RowCaches],
        lengths: Sequence[int],
        gaps: Sequence[Gaps] = (),
    ) -> Order:
        """Remove rows and add others; return the row for each place.

        `leaving`: places of rows. `lengths`: number of tokens in each joining row's caches. `gaps`: the
        skipped tokens of each; empty: none.
        """
        old = len(self.lengths)
        order = arrange(old, leaving, len(joining))
        mx.eval([layer.copy_moving_rows(order, old) for layer in self._layers])
        everybody = [*zip(self.lengths, self._positions_of_rows.gaps, strict=True)]
        everybody += zip(lengths, gaps or [NO_GAPS] * len(lengths), strict=True)
        self._positions_of_rows.assign(
            [everybody[row][0] for row in order], [everybody[row][1] for row in order]
        )
        for index, layer in enumerate(self._layers):
            layer.rearrange(order, old, [row[index] for row in joining])
        self.caches = [layer.cache for layer in self._layers]
        return order

    def advance(self) -> None:
        """Advance every row by one token, after a step has been dispatched."""
        self._positions_of_rows.advance()
        for layer in self._layers:
            layer.make_room()

    def extract(self, row: int, fresh: RowCaches) -> RowCaches:
        """Return copies of a row's caches, detached from the batch. `fresh`: empty caches of a single row."""
        return [layer.extract(row, like) for layer, like in zip(self._layers, fresh, strict=True)]

    def columns(self, row: int, first: int, last: int) -> list[list[mx.array]]:
        """Return a row's columns in each KV layer; see `PositionalLayer.columns`."""
        return [part.columns(row, first, last) for part in self._parts() if isinstance(part, PositionalLayer)]

    def states(self, row: int) -> list[Any]:
        """Return a row's state in each other layer, as upstream's cache of a single row returns it."""
        return [part.cache.extract(row).state for part in self._parts() if isinstance(part, StateLayer)]

    def _parts(self) -> list[Layer]:
        return [part for layer in self._layers for part in layer.parts()]

    @property
    def state(self) -> list[Any]:
        """What must be evaluated with each step, or the lazy graph would grow."""
        return [layer.state for layer in self._layers]

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the buffers; evaluates nothing."""
        return sum(layer.nbytes for layer in self._layers)


def arrange(rows: int, leaving: Sequence[int], joining: int) -> list[int]:
    """Return the row for each place when `leaving` rows leave and `joining` ones come, moving as few as
    possible.

    Joining rows take the free places first, then new ones at the end. Places still free are filled by the
    last rows. Joining rows are numbered from `rows` on.
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


def prefill_abreast(
    model: Callable[..., Any], chunks: Chunks, before: Mapping[str, RowCaches]
) -> dict[str, RowCaches]:
    """Return each row's caches after its chunk, lazily. Their caches in `before` end at one position.
    `model`: called as `model(tokens, cache=…)`.

    Raises what upstream's caches raise if they cannot leave padding out.
    """
    lengths = [len(tokens) for tokens in chunks.values()]
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    layers = zip(*(before[row] for row in chunks), strict=True)
    caches = [layer[0].merge(list(layer)) for layer in layers]
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    padded = [[*tokens, *[0] * pad] for tokens, pad in zip(chunks.values(), padding, strict=True)]
    model(mx.array(padded, mx.uint32), cache=caches)
    for cache in caches:
        cache.finalize()
    return {row: [cache.extract(index) for cache in caches] for index, row in enumerate(chunks)}
