"""Batch caches of one layer, for whatever kind of layer upstream's model makes.

KV layers, which store something for each token, are ours: a row's token at position `p`, skipped ones not
counted, is in column `p` of its slot; in a sliding window at `p` modulo the number of columns. So rows are
aligned at their beginnings, may be fed different numbers of tokens in a step, and may take some back:
rejected tokens are overwritten by later ones at the same positions, and until then the mask hides them. Where
the rows are in several buckets, attention runs bucket by bucket (`positions`).

All others are upstream's: states of fixed size that each step rewrites, so that `merge`, `extend` and
`filter` cost no more than a step, and caches that keep more than keys and values, for which a few families
bring a batch class of their own. The kind of a layer is found by its methods, never by its class.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from worker.runner.kv.buckets import FED_MAX, Bucket, Order, Refill, Source
from worker.runner.kv.positions import BatchPositions, Bucketed
from worker.runner.kv.single import (
    fill,
    grows,
    in_time_order,
    is_positional,
    is_split,
    state_of,
    whole_buffers,
)
from worker.runner.trees import arrays_of

Leaves = list[mx.array]


class KVLayer:
    """One layer of a batch, used as a cache by upstream's models.

    The buffers of a bucket, one for keys and one for values, or three for each with scales and biases, are
    [slots, heads, columns, width].
    """

    def __init__(self, positions: BatchPositions, like: Any) -> None:
        """`like`: a single row's cache of this layer."""
        self._positions = positions
        self._window: int | None = getattr(like, "max_size", None)
        # Rejected tokens must not overwrite visible ones.
        self._ring = None if self._window is None else self._window - 1 + FED_MAX
        self._quantized = hasattr(like, "bits")
        if self._quantized:
            # Upstream's attention recognizes quantized keys by these.
            self.bits, self.group_size = like.bits, like.group_size
        self._buffers: dict[Bucket, Leaves] = {}
        self._joining: dict[Source, tuple[Sequence[mx.array], int]] = {}
        self._moved: dict[Source, Leaves] = {}
        self._built: dict[Bucket, Leaves] = {}
        """All three: what `prepare` leaves to `rearrange`."""
        self._fed_step = 0
        """The last step in which it was updated."""

    # --- called by upstream's models ---

    @property
    def offset(self) -> Any:
        """The position of each row's first token of the step before it is written, and of the next one after:
        [rows] int32; of a single row a number."""
        return self._positions.offset(behind=self._is_fed)

    @property
    def _offset(self) -> int:
        """The largest of `offset`. mlx-vlm's models would read it from the array, and so wait for the step
        before."""
        return self._positions.longest + (self._positions.width if self._is_fed else 0)

    @property
    def _is_fed(self) -> bool:
        return self._fed_step == self._positions.step

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the step's tokens, [rows, heads, width, …]; see `keys_and_values`."""
        tokens = [keys, values]
        if self._quantized:
            tokens = [part for leaf in tokens for part in mx.quantize(leaf, self.group_size, self.bits)]
        for bucket in self._positions.buckets:
            if bucket not in self._buffers:
                self._buffers[bucket] = self._allocated(bucket, tokens)
            self._put(bucket, tokens)
        self._fed_step = self._positions.step
        return self.keys_and_values()

    def _put(self, bucket: Bucket, tokens: Sequence[mx.array]) -> None:
        leaves, columns = self._buffers[bucket], self._columns(bucket)
        first = self._positions.common_column(bucket, columns)
        layout = self._positions.layout
        if first is not None:  # one slice is written faster than scattered columns
            rows, last = len(bucket.rows), first + self._positions.width
            for leaf, token in zip(leaves, tokens, strict=True):
                leaf[:rows, :, first:last] = layout.select(token, bucket)
            return
        places = self._positions.places(bucket, columns)
        for index, token in enumerate(tokens):
            new = layout.select(token, bucket, spare=True)
            where = mx.broadcast_to(places, new.shape)
            leaves[index] = mx.put_along_axis(leaves[index], where, new, axis=2)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the columns that some row attends to, after the step's update: each [rows, heads, columns,
        width], or `Bucketed`."""
        found = [self._seen(bucket) for bucket in self._positions.buckets]
        layout = self._positions.layout
        if layout.is_plain:
            return found[0]
        keys, values = zip(*found, strict=True)
        return Bucketed(layout, keys), Bucketed(layout, values)

    def _seen(self, bucket: Bucket) -> tuple[Any, Any]:
        rows, last = len(bucket.rows), self._positions.seen(bucket, self._columns(bucket))
        seen = [leaf[:rows, :, :last] for leaf in self._buffers[bucket]]
        return (tuple(seen[:3]), tuple(seen[3:])) if self._quantized else (seen[0], seen[1])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return the mask of each row's own tokens up to the asking one, within the window: [rows, 1, width,
        columns] bool, or `Bucketed`; None if all true."""
        if self._positions.width != N:
            raise ValueError("the mask must be as wide as the step")
        sizes = [size for size in (self._window, window_size) if size is not None]
        return self._positions.mask(min(sizes, default=None), self._ring)

    # --- called by the batch ---

    def prepare(
        self, refills: Sequence[Refill], joining: Sequence[Any], lengths: Sequence[int]
    ) -> list[mx.array]:
        """Return what must be evaluated before `rearrange`: copies of the rows that move. `joining`: caches
        of single rows; `lengths`: their numbers of tokens.

        Writing to a buffer while a read of it is pending would copy all of it.
        """
        self._joining = {
            Source(None, number): (in_time_order(cache), length)
            for number, (cache, length) in enumerate(zip(joining, lengths, strict=True))
        }
        self._moved, self._built = {}, {}
        copies: list[mx.array] = []
        for refill in refills:
            moving = [source for source in refill.sources.values() if source.bucket in self._buffers]
            if refill.old is None:
                self._build(refill, joining)
                copies += self._built.get(refill.bucket, []) if moving else []
                continue
            for source in moving:
                self._moved[source] = [mx.contiguous(leaf) for leaf in self._slot(source)]
                copies += self._moved[source]
        return copies

    def rearrange(self, refills: Sequence[Refill]) -> None:
        """Rearrange the rows into the prepared buckets."""
        buffers = self._built
        for refill in refills:
            if refill.old not in self._buffers:
                continue
            leaves = buffers[refill.bucket] = self._buffers[refill.old]
            for slot, source in refill.sources.items():
                self._fill(leaves, slot, source)
        self._buffers, self._built, self._moved, self._joining = buffers, {}, {}, {}

    def _build(self, refill: Refill, joining: Sequence[Any]) -> None:
        """Make the buffers of a new bucket, lazily; none if nothing was fed to its rows."""
        sources = list(refill.sources.values())
        like = next(filter(None, map(self._leaves_of, sources)), None)
        if like is None:
            return
        own = whole_buffers(joining[sources[0].slot]) if sources[0].bucket is None else []
        if refill.bucket.slots == 1 and own and own[0].shape[2] == self._columns(refill.bucket):
            self._built[refill.bucket] = own
            return
        leaves = self._built[refill.bucket] = self._allocated(refill.bucket, like)
        for slot, source in refill.sources.items():
            self._fill(leaves, slot, source)

    def _leaves_of(self, source: Source) -> Sequence[mx.array]:
        if source.bucket is None:
            return self._joining[source][0]
        return self._moved.get(source) or self._slot(source)

    def _slot(self, source: Source) -> Leaves:
        leaves = self._buffers.get(source.bucket, []) if source.bucket else []
        return [leaf[source.slot : source.slot + 1] for leaf in leaves]

    def _fill(self, leaves: Leaves, slot: int, source: Source) -> None:
        """Write the tokens of `source` to a slot of the buffers `leaves`."""
        found, columns = self._leaves_of(source), leaves[0].shape[2]
        if source.bucket is not None:
            count = min(columns, found[0].shape[2]) if found else 0
            runs = [(0, 0, count)] if count else []
        else:
            held = found[0].shape[2] if found else 0
            last = self._joining[source][1]
            runs = [
                (at - (last - held), place, count)
                for at, place, count in _runs(max(last - held, last - self._reach), last, columns)
            ]
        for leaf, tokens in zip(leaves, found, strict=False):
            for at, place, count in runs:
                leaf[slot : slot + 1, :, place : place + count] = tokens[:, :, at : at + count]

    def extract(self, row: int, fresh: Any) -> Any:
        """Copy a row into `fresh`, an empty cache of a single row; the copy keeps nothing of the batch
        alive."""
        length = self._positions.lengths[row]
        fill(fresh, [mx.contiguous(leaf) for leaf in self.columns(row, 0, length)], length)
        return fresh

    def columns(self, row: int, first: int, last: int) -> list[mx.array]:
        """Return a row's leaves for its positions `first` to before `last`, as far as they are there. They
        are views of the buffers, and must be evaluated before these are written to."""
        bucket, slot = self._positions.seat(row)
        first = max(first, self._positions.lengths[row] - self._reach)
        leaves = self._slot(Source(bucket, slot))
        if not leaves:
            return []
        runs = list(_runs(first, last, self._columns(bucket)))
        return [
            mx.concatenate([leaf[:, :, place : place + count] for _, place, count in runs], axis=2)
            if len(runs) > 1
            else leaf[:, :, runs[0][1] : runs[0][1] + runs[0][2]]
            if runs
            else leaf[:, :, :0]
            for leaf in leaves
        ]

    @property
    def _reach(self) -> int:
        """Number of tokens before the next one that are still visible."""
        return 1 << 62 if self._window is None else self._window - 1

    def _columns(self, bucket: Bucket) -> int:
        return bucket.columns if self._ring is None else min(bucket.columns, self._ring)

    def _allocated(self, bucket: Bucket, like: Sequence[mx.array]) -> Leaves:
        return [
            mx.zeros((bucket.slots, leaf.shape[1], self._columns(bucket), leaf.shape[3]), leaf.dtype)
            for leaf in like
        ]

    @property
    def keys(self) -> mx.array:
        """The first buffer: some models attach arrays that must be evaluated with it."""
        return self._buffers[self._positions.buckets[0]][0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._buffers[self._positions.buckets[0]][0] = value

    @property
    def values(self) -> mx.array:
        """As `keys`."""
        return self._buffers[self._positions.buckets[0]][-1]

    @values.setter
    def values(self, value: mx.array) -> None:
        self._buffers[self._positions.buckets[0]][-1] = value

    @property
    def state(self) -> list[mx.array]:
        """What must be evaluated with the step."""
        return [leaf for leaves in self._buffers.values() for leaf in leaves]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.state)

    def parts(self) -> list[Any]:
        """Return the layer itself, its only part."""
        return [self]

    @property
    def cache(self) -> Any:
        """The cache that the model is given."""
        return self


def _runs(first: int, last: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """Yield the positions `first` to before `last` as runs of columns: (position, column, count)."""
    first = max(first, 0)
    while first < last:
        place = first % columns
        count = min(last - first, columns - place)
        yield first, place, count
        first += count


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
