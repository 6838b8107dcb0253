"""Keys and values of a batch of rows in one layer: of all their tokens, or of a sliding window.

The rows share one buffer, a slot each, aligned at their ends. A decode step then writes one column, whatever
the rows' lengths; a row joins by copying itself into a slot, and when one leaves, another moves into its
slot. Upstream's batch caches copy every row each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from worker.engine.caches import grouping
from worker.engine.caches.seats import Seats
from worker.engine.caches.single import fill, temporal

Order = Sequence[int]
"""Which row comes to sit at each place: the number of an old row; joining ones are counted on from these."""


class Buffers:
    """Keys and values, or with scales and biases three arrays for each: part of a cache of upstream's."""

    _leaves: list[mx.array]

    @property
    def keys(self) -> mx.array:
        """The buffer itself: some models tie to it what must be evaluated with it."""
        return self._leaves[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._leaves[0] = value

    @property
    def values(self) -> mx.array:
        """As `keys`."""
        return self._leaves[-1]

    @values.setter
    def values(self, value: mx.array) -> None:
        self._leaves[-1] = value

    @property
    def state(self) -> list[mx.array]:
        """What must be evaluated with the step."""
        return self._leaves

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._leaves)

    def parts(self) -> list[Any]:
        """See `CompositeLayer.parts`."""
        return [self]

    @property
    def cache(self) -> Any:
        """What the model is given."""
        return self


class PositionalLayer(Buffers):
    """One layer of a batch. Towards upstream's models it is a cache, for one token a row and step.

    The buffers, one for keys and one for values, or with scales and biases three for each, are
    [slots, heads, columns, width]. Column `c` lies at `c - base`; once the buffer of a sliding window is as
    wide as the window, at `c` modulo its width.
    """

    def __init__(self, seats: Seats, like: Any) -> None:
        """`like`: a single row's cache of this layer."""
        self._seats = seats
        self._window: int | None = getattr(like, "max_size", None)
        self._quantized = hasattr(like, "bits")
        if self._quantized:
            # Upstream's attention looks for these to know that it is given quantized keys.
            self.bits, self.group_size = like.bits, like.group_size
        self._leaves: list[mx.array] = []
        self._lifted: list[mx.array] = []
        self._base = 0
        self._updated = -1

    # --- what upstream's models use ---

    @property
    def offset(self) -> mx.array:
        """[rows] int32: the position of the step's token before it is written, of the next one after."""
        offset = self._seats.offset
        return offset + 1 if self._updated == self._seats.column else offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the step's token of each row, [rows, heads, 1, width]; see `keys_and_values`."""
        tokens = [keys, values]
        if self._quantized:
            tokens = [part for leaf in tokens for part in mx.quantize(leaf, self.group_size, self.bits)]
        if not self._leaves:
            self._lay_out(tokens)
        rows, column = len(self._seats.lengths), self._place(self._seats.column)
        for leaf, token in zip(self._leaves, tokens, strict=True):
            leaf[:rows, :, column : column + 1] = token
        self._updated = self._seats.column
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """The columns that some row looks at, after the step's update: each [rows, heads, columns, width]."""
        rows, end = len(self._seats.lengths), self._place(self._seats.column) + 1
        start, end = (0, self._columns) if self._is_ring else (end - self._width, end)
        seen = [leaf[:rows, :, start:end] for leaf in self._leaves]
        return (tuple(seen[:3]), tuple(seen[3:])) if self._quantized else (seen[0], seen[1])

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """[rows, 1, 1, columns] bool: a row's own columns within the window; None when all of them are."""
        if N != 1:
            raise ValueError("a batch takes one token of each row at a time")
        width = self._columns if self._is_ring else self._width
        sizes = [size for size in (self._window, window_size) if size is not None]
        limits = self._seats.seen(sizes)
        if min(limits) >= width:
            return None
        if self._is_ring:
            ages = (self._seats.column - mx.arange(width)) % width
        else:
            ages = mx.arange(width - 1, -1, -1)
        return ages < mx.array(limits, mx.int32)[:, None, None, None]

    # --- what the batch uses ---

    def lift(self, order: Order, old: int) -> list[mx.array]:
        """Copies of the rows that will change places: to be evaluated before `reseat`.

        While a read of the buffer is under way, a write to it would copy all of it.
        """
        moving = [row for place, row in enumerate(order) if place != row < old]
        self._lifted = [leaf[mx.array(moving)] for leaf in self._leaves] if moving else []
        return self._lifted

    def reseat(self, order: Order, old: int, joining: Sequence[Any]) -> None:
        """Seat the rows anew, of which there were `old`; the seats stand at the new ones already."""
        news = {place: temporal(joining[row - old]) for place, row in enumerate(order) if row >= old}
        filled = next((leaves for leaves in news.values() if leaves), None)
        if not order or (not self._leaves and filled is None):
            self._leaves = []
            return
        if not self._fits(len(order)):
            like = self._leaves or filled or []
            self._lay_out(like, [row if row < old else -1 for row in order])
        else:
            for index, place in enumerate(place for place, row in enumerate(order) if place != row < old):
                for leaf, copied in zip(self._leaves, self._lifted, strict=True):
                    leaf[place : place + 1] = copied[index : index + 1]
        self._lifted = []
        for place, leaves in news.items():
            self._write(place, leaves)

    def make_room(self) -> None:
        """See that the next token's column is there, before a mask is made for it."""
        if self._leaves and not self._is_ring and self._seats.column - self._base >= self._columns:
            self._lay_out(self._leaves)

    def extract(self, row: int, fresh: Any) -> Any:
        """A copy of a row that pins nothing of the batch, in `fresh`, an empty cache of a single row."""
        length = self._seats.lengths[row]
        parts = [mx.contiguous(leaf) for leaf in self.columns(row, 0, length)]
        fill(fresh, parts, length)
        return fresh

    def columns(self, row: int, first: int, last: int) -> list[mx.array]:
        """A row's leaves for its positions from `first` to before `last`, as far as they are there: parts of
        the buffers, which must be computed before these are written to."""
        length = self._seats.lengths[row]
        shift = self._seats.column - length
        first = max(first, length - min(length, self._reach))
        mine = [leaf[row : row + 1] for leaf in self._leaves]
        return [self._columns_of(leaf, first + shift, last + shift) for leaf in mine]

    # --- where things lie ---

    @property
    def _slots(self) -> int:
        return int(self._leaves[0].shape[0])

    @property
    def _columns(self) -> int:
        """Columns of the buffer, or those it will have."""
        return int(self._leaves[0].shape[2]) if self._leaves else self._columns_needed()

    def _columns_needed(self) -> int:
        columns = grouping.columns_for(self._width)
        return columns if self._window is None else min(columns, self._window)

    @property
    def _is_ring(self) -> bool:
        return self._columns == self._window

    @property
    def _reach(self) -> int:
        """How many tokens before the next one can still be looked at."""
        return 1 << 62 if self._window is None else self._window - 1

    @property
    def _width(self) -> int:
        """Columns that some row looks at, the step's own among them."""
        return min(max(self._seats.lengths), self._reach) + 1

    def _place(self, column: int) -> int:
        return column % self._columns if self._is_ring else column - self._base

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The columns from `first` to before `last` as runs in the buffer: (column, place, count)."""
        while first < last:
            place = self._place(first)
            count = min(last - first, self._columns - place)
            yield first, place, count
            first += count

    def _columns_of(self, leaf: mx.array, first: int, last: int) -> mx.array:
        """The columns of `leaf` from `first` to before `last`, in their order."""
        runs = [leaf[:, :, place : place + count] for _, place, count in self._runs(first, last)]
        return mx.concatenate(runs, axis=2) if len(runs) > 1 else runs[0] if runs else leaf[:, :, :0]

    def _fits(self, rows: int) -> bool:
        """Whether the buffer has room for the rows as they are seated, and not much more than that."""
        if not self._leaves or rows > self._slots:
            return False
        if self._slots * self._columns > grouping.SLACK * rows * self._columns_needed():
            return False
        column = self._seats.column
        return self._is_ring or (
            self._base <= column - self._width + 1 and column - self._base < self._columns
        )

    # --- moving data ---

    def _lay_out(self, like: Sequence[mx.array], order: Order | None = None) -> None:
        """New buffers for the rows as they are seated, with what the old ones hold of them.

        `like`: arrays with the heads, widths and dtypes of the leaves. `order`: the old row for each place,
        -1 for none; by default every row keeps its place.
        """
        old, held = self._leaves, []
        first = self._seats.column - self._width + 1
        if old:
            rows = mx.array([max(row, 0) for row in order]) if order else slice(len(self._seats.lengths))
            first_held = first if self._is_ring else max(first, self._base)
            held = [self._columns_of(leaf, first_held, self._seats.column)[rows] for leaf in old]
        columns = self._columns_needed()
        slots = int(grouping.SLACK * len(self._seats.lengths))
        self._leaves = [mx.zeros((slots, leaf.shape[1], columns, leaf.shape[3]), leaf.dtype) for leaf in like]
        self._base = first
        for place, leaf in enumerate(held):
            self._put(place, slice(leaf.shape[0]), leaf)

    def _write(self, place: int, leaves: Sequence[mx.array]) -> None:
        for index, leaf in enumerate(leaves):
            tokens = leaf.shape[2]
            self._put(index, slice(place, place + 1), leaf[:, :, max(0, tokens - self._reach) :])

    def _put(self, index: int, rows: slice, leaf: mx.array) -> None:
        """Write `leaf`, whose last column is the one before the next token's, into the buffer."""
        first = self._seats.column - leaf.shape[2]
        for column, place, count in self._runs(first, self._seats.column):
            part = leaf[:, :, column - first : column - first + count]
            self._leaves[index][rows, :, place : place + count] = part
