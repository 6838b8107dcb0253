"""Batch caches with rollback, for rows that take several tokens in a step and keep the accepted ones.

In KV layers rejected tokens are overwritten later. A recurrent state cannot be shortened: it is rolled back
to before the step, and the accepted tokens are fed again.
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
from worker.engine.caches.ragged import RaggedLayer, RaggedPositions


class ReversibleState(StateLayer):
    """A state layer that can be rolled back to before the step."""

    def __init__(self, like: Any) -> None:
        super().__init__(like)
        self._before: Any = None

    def begin(self, counts: Sequence[int]) -> None:
        """Begin a step that feeds each row `counts` tokens, padded on the right."""
        self._before = self.checkpoint()  # a copy: the list itself is written to
        width = max(counts)
        if min(counts) < width:  # steps without padding are faster
            self.cache.prepare(lengths=list(counts), right_padding=[width - count for count in counts])

    def finish(self) -> None:
        """Finish a dispatched step."""
        self.cache.finalize()

    def checkpoint(self) -> Any:
        """Return a checkpoint for `rollback`."""
        return tree_map(lambda leaf: leaf, self.cache.state)

    def rollback(self, saved: Any) -> None:
        """Roll all rows back to a checkpoint."""
        self.cache.state = saved

    def revert(self, rows: Sequence[bool]) -> None:
        """Roll the chosen rows back to before the step."""
        if any(rows):
            chosen = mx.array(list(rows))
            self.cache.state = tree_map(partial(_chosen, chosen), self._before, self.cache.state)
        self._before = None


def _chosen(rows: mx.array, before: Any, after: Any) -> Any:
    if not isinstance(after, mx.array):
        return after
    # Upstream merges rows without a state as zeros.
    known = mx.zeros_like(after) if before is None else before
    return mx.where(rows.reshape(-1, *[1] * (after.ndim - 1)), known, after)


class Checkpoint(NamedTuple):
    """Lengths and states of the rows of a batch, for rollback."""

    lengths: list[int]
    states: list[Any]


class RollbackBatch:
    """The caches of rows that decode together, each with its own number of tokens per step."""

    def __init__(self, like: RowCaches) -> None:
        """`like`: caches of a single row. Raises `ValueError` if a layer cannot be batched."""
        self._feed = RaggedPositions()
        positional = partial(RaggedLayer, self._feed)
        self._layers = [batch_layer(layer, positional, ReversibleState) for layer in like]
        self._states = [part for part in self._parts() if isinstance(part, ReversibleState)]
        self._counts: Sequence[int] = ()
        self.caches: list[Any] = []
        """The caches that the model is given, one per layer."""

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each row's caches."""
        return self._feed.lengths

    @property
    def has_states(self) -> bool:
        """Whether some layers cannot drop a part of what they were fed."""
        return bool(self._states)

    def rearrange(self, order: Order, joining: Sequence[RowCaches], lengths: Sequence[int]) -> None:
        """Rearrange the rows: old ones by their index, joining ones numbered behind these."""
        old = len(self.lengths)
        everybody = [*self.lengths, *lengths]
        self._feed.assign([everybody[row] for row in order])
        for index, layer in enumerate(self._layers):
            layer.rearrange(order, old, [row[index] for row in joining])
        self.caches = [layer.cache for layer in self._layers]

    def begin(self, counts: Sequence[int]) -> None:
        """Begin a step that feeds each row `counts` tokens, at least 1, padded on the right."""
        self._counts, self._feed.width = counts, max(counts)
        for part in self._parts():
            part.begin(counts)

    def finish(self) -> list[Any]:
        """Finish a dispatched step. Return what must be evaluated with it."""
        for part in self._parts():
            part.finish()
        return self.state

    def commit(self, kept: Sequence[int]) -> list[int]:
        """Keep the first `kept` tokens that each row was fed. Return the number in its caches: all of these,
        or 0 if the row was rolled back."""
        taken = [
            count if count == fed or not self.has_states else 0
            for count, fed in zip(kept, self._counts, strict=True)
        ]
        undone = [count < fed for count, fed in zip(taken, self._counts, strict=True)]
        for part in self._parts():
            part.revert(undone)
        self._feed.assign([length + count for length, count in zip(self.lengths, taken, strict=True)])
        return taken

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint for `rollback`."""
        return Checkpoint(self.lengths, [part.checkpoint() for part in self._states])

    def rollback(self, saved: Checkpoint) -> None:
        """Roll all rows back to a checkpoint, since which they have been fed at most `FED_MAX` tokens."""
        for part, state in zip(self._states, saved.states, strict=True):
            part.rollback(state)
        self._feed.assign(saved.lengths)

    def skip(self, counts: Sequence[int]) -> None:
        """Advance each row over `counts` tokens that are behind its end in the caches already. For batches
        without states."""
        self._feed.assign([length + count for length, count in zip(self.lengths, counts, strict=True)])

    @property
    def state(self) -> list[Any]:
        """What must be evaluated with each step, or the lazy graph would grow."""
        return [layer.state for layer in self._layers]

    def extract(self, row: int, fresh: RowCaches) -> RowCaches:
        """Return copies of a row's caches, detached from the batch. `fresh`: empty caches of a single row."""
        return [layer.extract(row, like) for layer, like in zip(self._layers, fresh, strict=True)]

    def _parts(self) -> list[Any]:
        return [part for layer in self._layers for part in layer.parts()]

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the buffers; evaluates nothing."""
        return sum(layer.nbytes for layer in self._layers)
