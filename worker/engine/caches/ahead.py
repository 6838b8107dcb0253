"""The caches of a batch whose rows take several tokens a step and keep as many of them as turn out right.

What is not kept of a layer with columns is written over later. A recurrent state cannot be taken back by
some of its tokens: its row goes back to the state before the step, and is fed again what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from worker.engine.caches.batch import RowCaches
from worker.engine.caches.layers import StateLayer, batch_layer
from worker.engine.caches.positional import Order
from worker.engine.caches.ragged import Feed, RaggedLayer


class ReversibleState(StateLayer):
    """A layer whose rows' states can be those before the step again."""

    def __init__(self, like: Any) -> None:
        super().__init__(like)
        self._before: Any = None

    def begin(self, counts: Sequence[int]) -> None:
        """Rows are fed so many tokens each, padded on the right."""
        self._before = self.stand()  # the list itself is written to
        width = max(counts)
        if min(counts) < width:  # what nobody is padded for is quicker without
            self.cache.prepare(lengths=list(counts), right_padding=[width - count for count in counts])

    def finish(self) -> None:
        """The step is dispatched."""
        self.cache.finalize()

    def stand(self) -> Any:
        """What `back` is given."""
        return tree_map(lambda leaf: leaf, self.cache.state)

    def back(self, standing: Any) -> None:
        """All rows' states are as they were then."""
        self.cache.state = standing

    def revert(self, rows: Sequence[bool]) -> None:
        """These rows' states are as they were."""
        if any(rows):
            chosen = mx.array(list(rows))
            self.cache.state = tree_map(partial(_chosen, chosen), self._before, self.cache.state)
        self._before = None


def _chosen(rows: mx.array, before: Any, after: Any) -> Any:
    if not isinstance(after, mx.array):
        return after
    # An empty state is what upstream merges rows that have none into.
    known = mx.zeros_like(after) if before is None else before
    return mx.where(rows.reshape(-1, *[1] * (after.ndim - 1)), known, after)


class Standing(NamedTuple):
    """Where the rows of a batch stood."""

    lengths: list[int]
    states: list[Any]


class AheadBatch:
    """Rows that decode together, each as many tokens a step as it is fed."""

    def __init__(self, like: RowCaches) -> None:
        """`like`: caches of a single row. Raises `ValueError` where a layer cannot be batched."""
        self._feed = Feed()
        positional = partial(RaggedLayer, self._feed)
        self._layers = [batch_layer(layer, positional, ReversibleState) for layer in like]
        self._states = [part for part in self._parts() if isinstance(part, ReversibleState)]
        self._counts: Sequence[int] = ()
        self.caches: list[Any] = []
        """What the model is given, one cache per layer."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row has in its caches."""
        return self._feed.lengths

    @property
    def has_states(self) -> bool:
        """Some layers cannot take back a part of what they were fed."""
        return bool(self._states)

    def reseat(self, order: Order, joining: Sequence[RowCaches], lengths: Sequence[int]) -> None:
        """Seat the rows anew: old ones by their number, those that join counted on from these."""
        old = len(self.lengths)
        everybody = [*self.lengths, *lengths]
        self._feed.seat([everybody[row] for row in order])
        for index, layer in enumerate(self._layers):
            layer.reseat(order, old, [row[index] for row in joining])
        self.caches = [layer.cache for layer in self._layers]

    def begin(self, counts: Sequence[int]) -> None:
        """Each row is to be fed so many tokens, at least 1, padded on the right to the most."""
        self._counts, self._feed.width = counts, max(counts)
        for part in self._parts():
            part.begin(counts)

    def finish(self) -> list[Any]:
        """The step has been dispatched. Returns what must be evaluated with it."""
        for part in self._parts():
            part.finish()
        return self.state

    def settle(self, kept: Sequence[int]) -> list[int]:
        """So many of the tokens that each row was fed are right. Returns how many are in its caches: all of
        these, or none."""
        taken = [
            count if count == fed or not self.has_states else 0
            for count, fed in zip(kept, self._counts, strict=True)
        ]
        undone = [count < fed for count, fed in zip(taken, self._counts, strict=True)]
        for part in self._parts():
            part.revert(undone)
        self._feed.seat([length + count for length, count in zip(self.lengths, taken, strict=True)])
        return taken

    def stand(self) -> Standing:
        """What `back` is given."""
        return Standing(self.lengths, [part.stand() for part in self._states])

    def back(self, standing: Standing) -> None:
        """All rows stand where they stood, if they have been fed no more than `FED_MAX` tokens since."""
        for part, state in zip(self._states, standing.states, strict=True):
            part.back(state)
        self._feed.seat(standing.lengths)

    def skip(self, counts: Sequence[int]) -> None:
        """So many of each row's next tokens are what is written behind its end already. For batches without
        states."""
        self._feed.seat([length + count for length, count in zip(self.lengths, counts, strict=True)])

    @property
    def state(self) -> list[Any]:
        """What must be evaluated with each step, or it would grow lazily."""
        return [layer.state for layer in self._layers]

    def extract(self, row: int, fresh: RowCaches) -> RowCaches:
        """A row's own caches, detached from the batch. `fresh`: empty caches of a single row."""
        return [layer.extract(row, like) for layer, like in zip(self._layers, fresh, strict=True)]

    def _parts(self) -> list[Any]:
        return [part for layer in self._layers for part in layer.parts()]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers as they are allocated; evaluates nothing."""
        return sum(layer.nbytes for layer in self._layers)
