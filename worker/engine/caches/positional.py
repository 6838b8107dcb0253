"""Batch KV cache of one layer, with full attention or a sliding window.

The rows share one buffer, one slot each, aligned at their ends. So a decode step writes one column, whatever
the rows' lengths. A joining row is copied into a slot; when a row leaves, another moves into its slot.
Upstream's batch caches copy every row each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from worker.engine.caches import grouping
from worker.engine.caches.single import fill, in_time_order
from worker.engine.caches.spans import Gaps

Order = Sequence[int]
"""The row for each place: the index of an old row, or from the number of old rows on that of a joining
one."""


class BatchPositions:
    """Positions shared by the layers of a batch, and advanced by the batch.

    `lengths`: tokens in each row's caches. `gaps`: tokens skipped before these. `column`: where the next
    token of every row goes. Columns are counted from an arbitrary origin and may be negative. A row fills the
    `lengths[row]` columns before `column`. `slack`: columns of all rows together that a new buffer may have
    for rows to come.
    """

    def __init__(self, slack: int = 0) -> None:
        self.slack = slack
        self.lengths: list[int] = []
        self.gaps: list[Gaps] = []
        self.column = 0
        self._offset: mx.array | None = None

    def assign(self, lengths: list[int], gaps: list[Gaps]) -> None:
        self.lengths, self.gaps = lengths, gaps
        self._offset = None

    def advance(self) -> None:
        """Advance every row by one token."""
        self.assign([length + 1 for length in self.lengths], self.gaps)
        self.column += 1

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, [rows] int32."""
        if self._offset is None:
            self._offset = mx.array(self._positions(), mx.int32)
        return self._offset

    @property
    def longest(self) -> int:
        """The largest position of a row's next token."""
        return max(self._positions())

    def seen(self, windows: Sequence[int]) -> list[int]:
        """Return how many of the last columns each row's next token attends to, its own included. A window
        counts positions, skipped ones as well."""
        if not windows:
            return [length + 1 for length in self.lengths]
        size = min(windows)
        positions = zip(self._positions(), self.gaps, strict=True)
        return [gaps.columns(at + 1 - size, at + 1) for at, gaps in positions]

    def _positions(self) -> list[int]:
        return [length + gaps.total for length, gaps in zip(self.lengths, self.gaps, strict=True)]


class Buffers:
    """Keys and values of a cache; if quantized, three arrays for each with scales and biases."""

    _leaves: list[mx.array]

    @property
    def keys(self) -> mx.array:
        """The buffer itself: some models attach arrays that must be evaluated with it."""
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
        """Return the layer itself, its only part."""
        return [self]

    @property
    def cache(self) -> Any:
        """The cache that the model is given."""
        return self


class PositionalLayer(Buffers):
    """One layer of a batch, used as a cache by upstream's models. Takes one token per row and step.

    The buffers, one for keys and one for values, or three for each with scales and biases, are [slots, heads,
    columns, width]. Column `c` is at index `c - base`. Once a sliding window's buffer is as wide as the
    window, it is at `c` modulo its width.
    """

    def __init__(self, seats: BatchPositions, like: Any) -> None:
        """`like`: a single row's cache of this layer."""
        self._positions_of_rows = seats
        self._window: int | None = getattr(like, "max_size", None)
        self._quantized = hasattr(like, "bits")
        if self._quantized:
            # Upstream's attention recognizes quantized keys by these.
            self.bits, self.group_size = like.bits, like.group_size
        self._leaves: list[mx.array] = []
        self._lifted: list[mx.array] = []
        self._base = 0
        self._updated = -1

    # --- called by upstream's models ---

    @property
    def offset(self) -> mx.array:
        """The position of the step's token before it is written, and of the next one after: [rows] int32."""
        offset = self._positions_of_rows.offset
        return offset + 1 if self._updated == self._positions_of_rows.column else offset

    @property
    def _offset(self) -> int:
        """The largest of `offset`. mlx-vlm's models would read it from the array, and so wait for the step
        before."""
        return self._positions_of_rows.longest + (self._updated == self._positions_of_rows.column)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the step's token of each row, [rows, heads, 1, width]; see `keys_and_values`."""
        tokens = [keys, values]
        if self._quantized:
            tokens = [part for leaf in tokens for part in mx.quantize(leaf, self.group_size, self.bits)]
        if not self._leaves:
            self._lay_out(tokens)
        rows, column = len(self._positions_of_rows.lengths), self._place(self._positions_of_rows.column)
        for leaf, token in zip(self._leaves, tokens, strict=True):
            leaf[:rows, :, column : column + 1] = token
        self._updated = self._positions_of_rows.column
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the columns that some row attends to, after the step's update: each [rows, heads, columns,
        width]."""
        rows, end = len(self._positions_of_rows.lengths), self._place(self._positions_of_rows.column) + 1
        start, end = (0, self._columns) if self._is_ring else (end - self._width, end)
        seen = [leaf[:rows, :, start:end] for leaf in self._leaves]
        return (tuple(seen[:3]), tuple(seen[3:])) if self._quantized else (seen[0], seen[1])

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return the mask of each row's own columns within the window, [rows, 1, 1, columns] bool; None if
        all true."""
        if N != 1:
            raise ValueError("a batch takes one token of each row at a time")
        width = self._columns if self._is_ring else self._width
        sizes = [size for size in (self._window, window_size) if size is not None]
        limits = self._positions_of_rows.seen(sizes)
        if min(limits) >= width:
            return None
        if self._is_ring:
            ages = (self._positions_of_rows.column - mx.arange(width)) % width
        else:
            ages = mx.arange(width - 1, -1, -1)
        return ages < mx.array(limits, mx.int32)[:, None, None, None]

    # --- called by the batch ---

    def copy_moving_rows(self, order: Order, old: int) -> list[mx.array]:
        """Return copies of the rows that will move, to be evaluated before `rearrange`.

        Writing to a buffer while a read of it is pending would copy all of it.
        """
        moving = [row for place, row in enumerate(order) if place != row < old]
        self._lifted = [leaf[mx.array(moving)] for leaf in self._leaves] if moving else []
        return self._lifted

    def rearrange(self, order: Order, old: int, joining: Sequence[Any]) -> None:
        """Rearrange the rows, of which there were `old`. The shared positions are those of the new rows
        already."""
        new_tokens = {
            place: in_time_order(joining[row - old]) for place, row in enumerate(order) if row >= old
        }
        filled = next((leaves for leaves in new_tokens.values() if leaves), None)
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
        for place, leaves in new_tokens.items():
            self._write(place, leaves)

    def make_room(self) -> None:
        """Make room for the next token's column, before a mask is made for it."""
        if (
            self._leaves
            and not self._is_ring
            and self._positions_of_rows.column - self._base >= self._columns
        ):
            self._lay_out(self._leaves)

    def extract(self, row: int, fresh: Any) -> Any:
        """Copy a row into `fresh`, an empty cache of a single row; the copy keeps nothing of the batch
        alive."""
        length = self._positions_of_rows.lengths[row]
        fill(fresh, [mx.contiguous(leaf) for leaf in self.columns(row, 0, length)], length)
        return fresh

    def columns(self, row: int, first: int, last: int) -> list[mx.array]:
        """Return a row's leaves for its positions `first` to before `last`, as far as they are there. They
        are views of the buffers, and must be evaluated before these are written to."""
        length = self._positions_of_rows.lengths[row]
        shift = self._positions_of_rows.column - length
        first = max(first, length - min(length, self._reach))
        mine = [leaf[row : row + 1] for leaf in self._leaves]
        return [self._columns_of(leaf, first + shift, last + shift) for leaf in mine]

    # --- layout ---

    @property
    def _slots(self) -> int:
        return int(self._leaves[0].shape[0])

    @property
    def _columns(self) -> int:
        """Number of columns of the buffer, or of the one to be allocated."""
        return int(self._leaves[0].shape[2]) if self._leaves else self._columns_needed()

    def _columns_needed(self) -> int:
        columns = grouping.columns_for(self._width)
        return columns if self._window is None else min(columns, self._window)

    @property
    def _is_ring(self) -> bool:
        return self._columns == self._window

    @property
    def _reach(self) -> int:
        """Number of tokens before the next one that are still visible."""
        return 1 << 62 if self._window is None else self._window - 1

    @property
    def _width(self) -> int:
        """Number of columns that some row attends to, including the step's own."""
        return min(max(self._positions_of_rows.lengths), self._reach) + 1

    def _place(self, column: int) -> int:
        return column % self._columns if self._is_ring else column - self._base

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield columns `first` to before `last` as runs in the buffer: (column, index, count)."""
        while first < last:
            place = self._place(first)
            count = min(last - first, self._columns - place)
            yield first, place, count
            first += count

    def _columns_of(self, leaf: mx.array, first: int, last: int) -> mx.array:
        """Return the columns of `leaf` from `first` to before `last`, in order."""
        runs = [leaf[:, :, place : place + count] for _, place, count in self._runs(first, last)]
        return mx.concatenate(runs, axis=2) if len(runs) > 1 else runs[0] if runs else leaf[:, :, :0]

    def _fits(self, rows: int) -> bool:
        """Return whether the buffer has room for the rows, and not much more than that."""
        if not self._leaves or rows > self._slots:
            return False
        if self._slots * self._columns > grouping.EMPTY_MAX * rows * self._columns_needed():
            return False
        column = self._positions_of_rows.column
        return self._is_ring or (
            self._base <= column - self._width + 1 and column - self._base < self._columns
        )

    # --- moving data ---

    def _lay_out(self, like: Sequence[mx.array], order: Order | None = None) -> None:
        """Allocate new buffers for the rows, with the contents of the old ones.

        `like`: arrays with the heads, widths and dtypes of the leaves. `order`: the old row for each place,
        -1 for none; by default every row keeps its place.
        """
        old, held = self._leaves, []
        first = self._positions_of_rows.column - self._width + 1
        if old:
            rows = (
                mx.array([max(row, 0) for row in order])
                if order
                else slice(len(self._positions_of_rows.lengths))
            )
            first_held = first if self._is_ring else max(first, self._base)
            held = [self._columns_of(leaf, first_held, self._positions_of_rows.column)[rows] for leaf in old]
        columns = self._columns_needed()
        count = len(self._positions_of_rows.lengths)
        slots = max(
            int(grouping.SLACK * count),
            min(int(grouping.GROWTH * count), count + self._positions_of_rows.slack // columns),
        )
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
        first = self._positions_of_rows.column - leaf.shape[2]
        for column, place, count in self._runs(first, self._positions_of_rows.column):
            part = leaf[:, :, column - first : column - first + count]
            self._leaves[index][rows, :, place : place + count] = part
