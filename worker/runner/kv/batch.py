"""Batch cache over all layers: rows join and leave, are fed any number of tokens in a step, and keep the
accepted ones.

In KV layers rejected tokens are overwritten later. A recurrent state cannot be shortened: it is rolled back
to before the step, and the accepted tokens are fed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from worker.runner.kv.buckets import FED_MAX, Order, arrange, capacity, refill
from worker.runner.kv.layers import KVLayer, StateLayer, batch_layer, extracted
from worker.runner.kv.positions import BatchPositions
from worker.runner.kv.single import is_split
from worker.runner.kv.sparse_rows import NO_GAPS, split

RowCaches = list[Any]
"""One cache per layer of a single row, of whatever classes upstream's model makes."""

Chunks = Mapping[str, Sequence[int]]


def leaf_caches(caches: Iterable[Any]) -> Iterator[Any]:
    """Yield the caches of a single row, with composite ones split into their parts where these are handled
    one by one."""
    for cache in caches:
        if is_split(cache):
            yield from leaf_caches(cache.caches)
        else:
            yield cache


class Checkpoint(NamedTuple):
    """Lengths and states of the rows of a batch, for rollback."""

    lengths: list[int]
    states: list[Any]


class CacheBatch:
    """The caches of rows that decode together."""

    def __init__(
        self, like: RowCaches, *, is_bucketed: bool = False, capacity: Callable[[int], int] = capacity
    ) -> None:
        """`like`: caches of a single row. `is_bucketed`: the model attends bucket by bucket
        (`positions`); else all rows share one bucket. `capacity`: see there. Raises `ValueError` if a
        layer cannot be batched."""
        self._is_bucketed = is_bucketed
        self._capacity = capacity
        self._positions = BatchPositions()
        self._layers = [batch_layer(self._positions, layer) for layer in like]
        self._parts = [part for layer in self._layers for part in layer.parts()]
        self._states = [part for part in self._parts if isinstance(part, StateLayer)]
        self._kv = [part for part in self._parts if isinstance(part, KVLayer)]
        self._counts: Sequence[int] = ()
        self._may_revert = False
        self.caches: list[Any] = []
        """The caches that the model is given, one per layer."""

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each row's caches."""
        return self._positions.lengths

    @property
    def has_states(self) -> bool:
        """Whether some layers cannot drop a part of what they were fed."""
        return bool(self._states)

    # --- rows ---

    def rearrange(
        self, leaving: Sequence[int], joining: Sequence[RowCaches], lengths: Sequence[int]
    ) -> Order:
        """Remove rows and add others; return the row for each place.

        `leaving`: places of rows. `lengths`: position of each joining row's next token.
        """
        order = arrange(len(self.lengths), leaving, len(joining))
        self._rearrange(order, [list(leaf_caches(row)) for row in joining], lengths)
        self.caches = [layer.cache for layer in self._layers]
        return order

    def _rearrange(self, order: Order, joining: Sequence[list[Any]], lengths: Sequence[int]) -> None:
        old, positions = len(self.lengths), self._positions
        parts = [list(map(split, row)) for row in joining]
        joining = [[cache for cache, _ in row] for row in parts]
        gaps = [next((gaps for _, gaps in row if gaps.spans), NO_GAPS) for row in parts]
        lengths = [length - each.total for length, each in zip(lengths, gaps, strict=True)]
        all_lengths, all_gaps = [*positions.lengths, *lengths], [*positions.gaps, *gaps]
        kept = [all_lengths[row] for row in order]
        refills = refill(
            positions.buckets, order, list(map(self._capacity, kept)), old, is_single=not self._is_bucketed
        )
        mx.eval([
            part.prepare(refills, [row[index] for row in joining], lengths)
            for index, part in enumerate(self._parts)
            if isinstance(part, KVLayer)
        ])  # fmt: skip
        positions.arrange(kept, [all_gaps[row] for row in order], [each.bucket for each in refills])
        for index, part in enumerate(self._parts):
            if isinstance(part, KVLayer):
                part.rearrange(refills)
            elif isinstance(part, StateLayer) and list(order) != list(range(old)):
                part.rearrange(order, old, [row[index] for row in joining])

    def _outgrown(self) -> bool:
        """Return whether a row has no room for a step."""
        return any(
            max(self.lengths[row] for row in bucket.rows) + FED_MAX > bucket.columns
            for bucket in self._positions.buckets
        )

    def extract(self, row: int, fresh: RowCaches) -> RowCaches:
        """Return copies of a row's caches, detached from the batch. `fresh`: empty caches of a single row."""
        return [layer.extract(row, like) for layer, like in zip(self._layers, fresh, strict=True)]

    def columns(self, row: int, first: int, last: int) -> list[list[mx.array]]:
        """Return a row's columns in each KV layer; see `KVLayer.columns`."""
        return [part.columns(row, first, last) for part in self._kv]

    def states(self, row: int) -> list[Any]:
        """Return a row's state in each other layer, as upstream's cache of a single row returns it."""
        return [part.state_of(row) for part in self._states]

    # --- steps ---

    def begin(self, counts: Sequence[int], *, may_revert: bool = True) -> None:
        """Begin a step that feeds each row `counts` tokens, at least 1, padded on the right. `may_revert`: a
        row may keep fewer of them."""
        assert max(counts) <= FED_MAX, "slots have room for a step"
        self._counts, self._may_revert = counts, may_revert
        if self._outgrown():
            self._rearrange(range(len(self.lengths)), [], [])
        self._positions.begin(max(counts))
        if may_revert:
            for part in self._states:
                part.begin(counts)

    def finish(self) -> list[Any]:
        """Finish a dispatched step. Return what must be evaluated with it, or the lazy graph would grow."""
        if self._may_revert:
            for part in self._states:
                part.finish()
        return self.state

    def advance(self) -> None:
        """Keep all tokens that the rows were fed."""
        self.skip(self._counts)

    def commit(self, kept: Sequence[int]) -> list[int]:
        """Keep the first `kept` tokens that each row was fed. Return the number in its caches: all of these,
        or 0 if the row was rolled back."""
        taken = [
            count if count == fed or not self.has_states else 0
            for count, fed in zip(kept, self._counts, strict=True)
        ]
        undone = [count < fed for count, fed in zip(taken, self._counts, strict=True)]
        for part in self._states:
            part.revert(undone)
        self.skip(taken)
        return taken

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint for `rollback`."""
        return Checkpoint(self.lengths, [part.checkpoint() for part in self._states])

    def rollback(self, saved: Checkpoint) -> None:
        """Roll all rows back to a checkpoint, since which they have been fed at most `FED_MAX` tokens."""
        for part, state in zip(self._states, saved.states, strict=True):
            part.rollback(state)
        self._positions.assign(saved.lengths)

    def skip(self, counts: Sequence[int]) -> None:
        """Advance each row over `counts` tokens that are behind its end in the caches already."""
        self._positions.assign([length + count for length, count in zip(self.lengths, counts, strict=True)])

    @property
    def state(self) -> list[Any]:
        """What must be evaluated with each step, or the lazy graph would grow."""
        return [layer.state for layer in self._layers]

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the buffers; evaluates nothing."""
        return sum(layer.nbytes for layer in self._layers)


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
    return {
        row: [extracted(cache, index, own) for cache, own in zip(caches, before[row], strict=True)]
        for index, row in enumerate(chunks)
    }
