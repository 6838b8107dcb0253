"""Positions of a batch's rows, shared by its layers: offsets, columns to write to, and attention masks.

Each array is made once for a step, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import mlx.core as mx

from worker.runner.bucket_attention import Bucketed, Layout
from worker.runner.kv.buckets import Bucket
from worker.runner.kv.sparse_rows import Gaps


class BatchPositions:
    """Positions of the rows, advanced by the batch."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Tokens in each row's caches."""
        self.gaps: list[Gaps] = []
        """Tokens skipped before these."""
        self.width = 1
        """Tokens that each row is fed in the current step, with padding."""
        self.step = 0
        """Number of steps begun."""
        self.buckets: list[Bucket] = []
        self.layout = Layout([])
        self._made: dict[Hashable, Any] = {}

    def arrange(self, lengths: list[int], gaps: list[Gaps], buckets: list[Bucket]) -> None:
        """Set the rows and their buckets."""
        self.gaps, self.buckets, self.layout = gaps, buckets, Layout(buckets)
        self.assign(lengths)

    def assign(self, lengths: list[int]) -> None:
        """Set the number of tokens in the caches."""
        self.lengths = lengths
        self._made.clear()

    def begin(self, width: int) -> None:
        """Begin a step that feeds each row `width` tokens."""
        self.width = width
        self.step += 1
        self._made.clear()

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # --- positions ---

    def next_positions(self) -> list[int]:
        """Return the position of each row's next token, skipped ones counted."""
        return [length + gaps.total for length, gaps in zip(self.lengths, self.gaps, strict=True)]

    @property
    def longest(self) -> int:
        """The largest position of a row's next token."""
        return max(self.next_positions())

    def offset(self, *, behind: bool) -> Any:
        """Return the position of each row's next token, [rows] int32, of a single row a number. `behind`: of
        that behind the step."""
        return self._once(("offset", behind), lambda: self._offset(self.width if behind else 0))

    def _offset(self, add: int) -> Any:
        found = [at + add for at in self.next_positions()]
        return found[0] if len(found) == 1 else mx.array(found, mx.int32)

    # --- columns ---

    def seat(self, row: int) -> tuple[Bucket, int]:
        """Return a row's bucket and slot."""
        return next((each, each.rows.index(row)) for each in self.buckets if row in each.rows)

    def common_column(self, bucket: Bucket, columns: int) -> int | None:
        """Return the column that the step's first token of all rows of a bucket is written to; None: they
        differ, or the tokens do not fit behind it."""

        def find() -> int | None:
            lengths = {self.lengths[row] for row in bucket.rows}
            first = min(lengths) % columns
            return first if len(lengths) == 1 and first + self.width <= columns else None

        found: int | None = self._once(("common", bucket, columns), find)
        return found

    def places(self, bucket: Bucket, columns: int) -> mx.array:
        """Return the column that each of the step's tokens is written to, [slots, 1, width, 1] int32."""

        def make() -> mx.array:
            starts = [self.lengths[row] for row in bucket.rows]
            starts += [0] * (bucket.slots - len(starts))
            places = mx.array(starts, mx.int32)[:, None] + mx.arange(self.width)
            return (places % columns)[:, None, :, None]

        made: mx.array = self._once((bucket, columns), make)
        return made

    def seen(self, bucket: Bucket, columns: int) -> int:
        """Return how many columns some row of a bucket attends to in the step."""
        end: int = self._once(("end", bucket), lambda: max(self.lengths[row] for row in bucket.rows))
        return min(end + self.width, columns)

    # --- masks ---

    def mask(self, window: int | None, ring: int | None) -> Any:
        """Return the step's mask; see `KVLayer.make_mask`. `ring`: columns at which slots wrap around."""
        return self._once(("mask", window, ring), lambda: self._mask(window, ring))

    def _mask(self, window: int | None, ring: int | None) -> Any:
        masks = [self._mask_of(bucket, window, ring) for bucket in self.buckets]
        if self.layout.is_plain:
            return masks[0]
        return None if all(mask is None for mask in masks) else Bucketed(self.layout, masks)

    def _mask_of(self, bucket: Bucket, window: int | None, ring: int | None) -> mx.array | None:
        """Return a bucket's mask, [rows, 1, width, columns] bool; None if all true."""
        lengths = [self.lengths[row] for row in bucket.rows]
        end, width = max(lengths) + self.width, self.width
        columns = min(bucket.columns, ring or end)
        is_whole = width == 1 and min(lengths) == max(lengths) and end <= columns
        lows = self._lows(bucket, window)
        if is_whole and max(low for row in lows for low in row) <= 0:
            return None
        starts = mx.array(lengths, mx.int32)[:, None, None, None]
        places, asking = mx.arange(min(end, columns)), starts + mx.arange(width)[:, None]
        if end > columns:  # the last position up to the step's end that each column can hold
            last = starts + (width - 1)
            places = last - (last - places) % columns
        mask = places <= asking
        if window is None:
            return mask
        return mask & (places >= mx.maximum(mx.array(lows, mx.int32)[:, None, :, None], 0))

    def _lows(self, bucket: Bucket, window: int | None) -> list[list[int]]:
        """Return the first column that each of the step's tokens attends to, [rows, width]. A window counts
        positions, skipped ones as well."""
        if window is None:
            return [[0]]
        return [self._lows_of(row, window) for row in bucket.rows]

    def _lows_of(self, row: int, window: int) -> list[int]:
        length, gaps = self.lengths[row], self.gaps[row]
        ends = range(length + 1, length + 1 + self.width)
        if not gaps.spans:
            return [end - window for end in ends]
        return [end - gaps.columns(end + gaps.total - window, end + gaps.total) for end in ends]
