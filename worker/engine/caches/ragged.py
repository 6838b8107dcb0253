"""Ragged KV cache: keys and values of a batch whose rows take different numbers of tokens in a step.

A row's token at position `p` is in column `p`; in a sliding window it is at `p` modulo the buffer's width. So
rows are aligned at their beginnings, not at their ends. Rejected tokens are overwritten by later ones at the
same positions; until then the mask hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from worker.engine.caches import grouping
from worker.engine.caches.positional import Buffers, Order
from worker.engine.caches.single import fill, in_time_order

FED_MAX = 16
"""Maximum number of tokens of a row in one step."""


class RaggedPositions:
    """Positions shared by the layers of a batch. `lengths`: tokens in each row's caches. `width`: tokens that
    each row is fed in the current step, with padding."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.width = 1
        self._offset: mx.array | None = None
        self._places: dict[tuple[int, int | None], mx.array] = {}

    def assign(self, lengths: list[int]) -> None:
        """Set the number of tokens in the caches."""
        self.lengths = lengths
        self._offset = None
        self._places.clear()

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, [rows] int32."""
        if self._offset is None:
            self._offset = mx.array(self.lengths, mx.int32)
        return self._offset

    def places(self, ring: int | None) -> mx.array:
        """Return the column that each of the step's tokens is written to, [rows, 1, width, 1] int32. `ring`:
        the width at which the buffer wraps around."""
        key = self.width, ring
        if key not in self._places:
            places = self.offset[:, None] + mx.arange(self.width)
            self._places[key] = (places % ring if ring else places)[:, None, :, None]
        return self._places[key]

    @property
    def end(self) -> int:
        """The position behind the last one written in the step."""
        return max(self.lengths) + self.width


class RaggedLayer(Buffers):
    """One layer of a batch, used as a cache by upstream's models. Its buffers, like those of
    `PositionalLayer`, are [rows, heads, columns, width]."""

    def __init__(self, feed: RaggedPositions, like: Any) -> None:
        """`like`: a single row's cache of this layer."""
        self._feed = feed
        self._window: int | None = getattr(like, "max_size", None)
        self._quantized = hasattr(like, "bits")
        if self._quantized:
            self.bits, self.group_size = like.bits, like.group_size
        self._leaves: list[mx.array] = []
        self._is_fed = False

    # --- called by upstream's models ---

    @property
    def offset(self) -> mx.array:
        """The position of the step's first token before it is written, and of the next one after: [rows]
        int32."""
        return self._feed.offset + self._feed.width if self._is_fed else self._feed.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the step's tokens, [rows, heads, width, …]; return all columns that some row attends to."""
        tokens = [keys, values]
        if self._quantized:
            tokens = [part for leaf in tokens for part in mx.quantize(leaf, self.group_size, self.bits)]
        self._make_room(tokens)
        if self._ring is None and len(self._feed.lengths) == 1:
            self._put_one(tokens)
        else:
            self._put(tokens)
        self._is_fed = True
        return self.keys_and_values()

    def _put(self, tokens: Sequence[mx.array]) -> None:
        places = self._feed.places(self._ring)
        for index, token in enumerate(tokens):
            where = mx.broadcast_to(places, token.shape)
            self._leaves[index] = mx.put_along_axis(self._leaves[index], where, token, axis=2)

    def _put_one(self, tokens: Sequence[mx.array]) -> None:
        """As `_put`, for a single row, whose columns are contiguous: faster."""
        first = self._feed.lengths[0]
        for leaf, token in zip(self._leaves, tokens, strict=True):
            leaf[:, :, first : first + self._feed.width] = token

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all columns that some row attends to."""
        seen = [leaf[:, :, : self._seen] for leaf in self._leaves]
        return (tuple(seen[:3]), tuple(seen[3:])) if self._quantized else (seen[0], seen[1])

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return the attention mask, [rows, 1, width, columns] bool; None if it would be all true."""
        assert self._feed.width == N, "the mask must be as wide as the step"
        windows = [size for size in (self._window, window_size) if size is not None]
        if N == 1 and len(self._feed.lengths) == 1 and not windows:
            return None
        last = (self._feed.offset + (N - 1))[:, None, None, None]
        columns = mx.arange(self._seen)
        # The last position up to the step's end that each column of a ring can hold.
        positions = last - (last - columns) % self._ring if self._ring else columns
        asking = self._feed.offset[:, None, None, None] + mx.arange(N)[:, None]
        mask = (positions <= asking) & (positions >= 0)
        return mask & (positions > asking - min(windows)) if windows else mask

    # --- called by the batch ---

    def begin(self, counts: Sequence[int]) -> None:
        """Begin a step."""
        self._is_fed = False

    def finish(self) -> None:
        """Do nothing: a KV layer has nothing to finish."""

    def revert(self, rows: Sequence[bool]) -> None:
        """Do nothing: rejected tokens are overwritten."""

    def rearrange(self, order: Order, old: int, joining: Sequence[Any]) -> None:
        """Rearrange the rows, of which there were `old`. The shared positions are those of the new rows
        already."""
        new_tokens = {
            place: in_time_order(joining[row - old]) for place, row in enumerate(order) if row >= old
        }
        self._is_fed = False
        if not order or not (self._leaves or any(new_tokens.values())):
            self._leaves = []
            return
        like = self._leaves or next(leaves for leaves in new_tokens.values() if leaves)
        kept = mx.array([row if row < old else 0 for row in order])
        columns = self._columns_needed()
        self._leaves = [
            _widened(leaf[kept], columns)
            if self._leaves
            else mx.zeros((len(order), leaf.shape[1], columns, leaf.shape[3]), leaf.dtype)
            for leaf in like
        ]
        for place, leaves in new_tokens.items():
            self._write(place, leaves)

    def extract(self, row: int, fresh: Any) -> Any:
        """Copy a row into `fresh`, an empty cache of a single row; the copy keeps nothing of the batch
        alive."""
        length = self._feed.lengths[row]
        fill(fresh, [mx.contiguous(leaf) for leaf in self.columns(row, 0, length)], length)
        return fresh

    def columns(self, row: int, first: int, last: int) -> list[mx.array]:
        """Return a row's leaves for its positions `first` to before `last`, as far as they are there."""
        length = self._feed.lengths[row]
        reach = length if self._window is None else self._window - 1
        places = mx.arange(max(first, length - min(length, reach)), last)
        places = places % self._ring if self._ring else places
        return [mx.take(leaf[row : row + 1], places, axis=2) for leaf in self._leaves]

    # --- layout ---

    @property
    def _ring(self) -> int | None:
        """The width at which a sliding window's buffer wraps around; None: no window. Rejected tokens must
        not overwrite visible ones."""
        return None if self._window is None else grouping.columns_for(self._window - 1 + FED_MAX)

    @property
    def _seen(self) -> int:
        """Number of columns that some row attends to."""
        return min(self._feed.end, self._ring) if self._ring else self._feed.end

    def _columns_needed(self) -> int:
        columns = grouping.columns_for(max(self._feed.lengths) + FED_MAX)
        return min(columns, self._ring) if self._ring else columns

    def _make_room(self, like: Sequence[mx.array]) -> None:
        columns = self._columns_needed()
        if not self._leaves:
            shapes = [(leaf.shape[0], leaf.shape[1], columns, leaf.shape[3]) for leaf in like]
            self._leaves = [mx.zeros(shape, leaf.dtype) for shape, leaf in zip(shapes, like, strict=True)]
        self._leaves = [_widened(leaf, columns) for leaf in self._leaves]

    def _write(self, place: int, leaves: Sequence[mx.array]) -> None:
        length = self._feed.lengths[place]
        for index, leaf in enumerate(leaves):
            reach = leaf.shape[2] if self._window is None else self._window - 1
            part = leaf[:, :, max(0, leaf.shape[2] - reach) :]
            places = mx.arange(length - part.shape[2], length)
            places = places % self._ring if self._ring else places
            where = mx.broadcast_to(places[None, None, :, None], part.shape)
            row = mx.put_along_axis(self._leaves[index][place : place + 1], where, part, axis=2)
            self._leaves[index][place : place + 1] = row


def _widened(leaf: mx.array, columns: int) -> mx.array:
    missing = columns - leaf.shape[2]
    if missing <= 0:
        return leaf
    return mx.pad(leaf, [(0, 0), (0, 0), (0, missing), (0, 0)])
