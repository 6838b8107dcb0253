"""Cache batches against the simplest reference: one list of tokens per row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_vlm.models.base import cache_position_offset

from worker.runner.kv.batch import CacheBatch
from worker.runner.kv.buckets import FED_MAX
from worker.runner.kv.positions import Bucketed

HEADS, WIDTH = 2, 32
STEP = 4
"""Growth step of the buffers, small so that they are outgrown often."""


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "step", STEP)
    monkeypatch.setattr(RotatingKVCache, "step", STEP)


def _capacity(tokens: int) -> int:
    return -(-(tokens + FED_MAX) // STEP) * STEP


class _Rows:
    """Drives a batch of one layer and the reference. A token is the value that fills its vectors."""

    def __init__(self, make: Any, is_bucketed: bool = True) -> None:
        self.make = make
        self.random = random.Random(5)
        self.batch = CacheBatch([make()], is_bucketed=is_bucketed, capacity=_capacity)
        self.tokens: list[list[int]] = []
        self.drawn = 0

    def new_tokens(self, count: int) -> list[int]:
        self.drawn += count
        return list(range(self.drawn - count + 1, self.drawn + 1))

    def row_of(self, tokens: Sequence[int]) -> Any:
        """Return a single row's cache, filled with `tokens` in chunks by upstream."""
        cache, left = self.make(), list(tokens)
        while left:
            size = self.random.choice([1, 2, 3, len(left)])
            chunk, left = left[:size], left[size:]
            cache.update_and_fetch(_vectors([chunk]), -_vectors([chunk]))
        return cache

    def rearrange(self, leaving: list[int], lengths: list[int]) -> None:
        joining = [self.new_tokens(length) for length in lengths]
        order = self.batch.rearrange(leaving, [[self.row_of(tokens)] for tokens in joining], lengths)
        everybody = [*self.tokens, *joining]
        assert sorted(order) == [row for row in range(len(everybody)) if row not in leaving]
        self.tokens = [everybody[row] for row in order]

    def step(self, width: int = 1) -> None:
        """Feed each row up to `width` tokens, of which it keeps some."""
        counts = [self.random.randint(1, width) for _ in self.tokens]
        counts[0] = width
        kept = [self.random.randint(1, count) for count in counts] if width > 1 else counts
        new = [self.new_tokens(width) for _ in self.tokens]
        self.batch.begin(counts, may_revert=width > 1)
        cache, before = self.batch.caches[0], [len(tokens) for tokens in self.tokens]
        assert _numbers(cache.offset) == before
        mask = cache.make_mask(width)
        keys, values = cache.update_and_fetch(_vectors(new), -_vectors(new))
        assert _numbers(cache.offset) == [length + width for length in before]
        seen = _read(keys, cache), _read(values, cache)
        fed = [tokens + more for tokens, more in zip(self.tokens, new, strict=True)]
        self.check(mask, fed, counts, *seen)
        mx.eval(self.batch.finish())
        if width > 1:
            self.batch.commit(kept)
        else:
            self.batch.advance()
        self.tokens = [tokens[: len(tokens) - width + count] for tokens, count in zip(fed, kept, strict=True)]

    def check(
        self,
        mask: Any,
        fed: Sequence[Sequence[int]],
        counts: Sequence[int],
        keys: list[np.ndarray],
        values: list[np.ndarray],
    ) -> None:
        """Each of a row's new tokens attends to all of its own up to itself."""
        window, width = getattr(self.make(), "max_size", None), max(counts)
        masks = mask if isinstance(mask, Bucketed) else [mask] * len(keys)
        assert sum(len(each) for each in keys) == len(self.tokens)
        for bucket, some, others, seen in zip(self.buckets(), keys, values, masks, strict=True):
            assert (some == some[:, :1, :, :1]).all()
            assert (others == -some).all()
            for slot, row in enumerate(bucket.rows):
                for place in range(counts[row]):
                    shown = np.ones(some.shape[2], bool) if seen is None else np.array(seen[slot, 0, place])
                    own = fed[row][: len(fed[row]) - width + place + 1]
                    expected = own if window is None else own[-window:]
                    assert sorted(some[slot, 0, shown, 0].tolist()) == expected

    def buckets(self) -> list[Any]:
        return self.batch._positions.buckets


def _numbers(offset: Any) -> list[int]:
    """Return the offsets of all rows; that of a single row is a number."""
    return [offset] if isinstance(offset, int) else offset.tolist()


def _vectors(rows: Sequence[Sequence[int]]) -> mx.array:
    numbers = mx.array(rows, mx.float32)[:, None, :, None]
    return mx.broadcast_to(numbers, (len(rows), HEADS, len(rows[0]), WIDTH))


def _read(leaf: Any, cache: Any) -> list[np.ndarray]:
    """Return the array of each bucket."""
    parts = leaf if isinstance(leaf, Bucketed) else [leaf]
    if isinstance(parts[0], tuple):
        parts = [mx.dequantize(*part, group_size=cache.group_size, bits=cache.bits) for part in parts]
    return [np.array(part) for part in parts]


KINDS = {
    "all tokens": KVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
    **{f"window of {size}": lambda size=size: RotatingKVCache(max_size=size) for size in (2, 7)},
}


@pytest.mark.parametrize("is_bucketed", [True, False], ids=["bucketed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_sees_its_own_tokens_and_nothing_else(kind: str, is_bucketed: bool) -> None:
    rows = _Rows(KINDS[kind], is_bucketed)
    for _ in range(30):
        leaving = [row for row in range(len(rows.tokens)) if rows.random.random() < 0.15]
        joining = rows.random.choices([0, 1, 2, 4], [6, 3, 1, 1])[0]
        lengths = [rows.random.choice([0, 1, 2, 5, 9, 17, 40]) for _ in range(joining)]
        if leaving or joining:
            rows.rearrange(leaving, lengths)
        for _ in range(rows.random.randint(0, 5)):
            if rows.tokens:
                rows.step(rows.random.choice([1, 1, 1, 2, 5]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_taken_out_as_it_would_be_alone_and_stays_as_it_was(kind: str) -> None:
    rows = _Rows(KINDS[kind])
    rows.rearrange([], [3, 11, 1, 30])
    for width in (1, 1, 3, 1, 5, 1, 1):
        rows.step(width)
    taken = [rows.batch.extract(row, [rows.make()])[0] for row in range(4)]
    before = [[*tokens] for tokens in rows.tokens]
    for _ in range(5):
        rows.step()
    for cache, tokens in zip(taken, before, strict=True):
        alone = rows.row_of(tokens)
        assert cache.offset == alone.offset == len(tokens)
        token = rows.new_tokens(1)
        ours, theirs = (
            _read(each.update_and_fetch(_vectors([token]), -_vectors([token]))[0], each)[0]
            for each in (cache, alone)
        )
        assert sorted(ours[0, 0, :, 0].tolist()) == sorted(theirs[0, 0, :, 0].tolist())


def test_a_row_that_joins_alone_keeps_the_buffers_that_it_has() -> None:
    own = KVCache()
    own.keys = own.values = mx.zeros((1, HEADS, _capacity(5), WIDTH))
    own.offset = 5
    batch = CacheBatch([KVCache()], is_bucketed=True, capacity=_capacity)
    batch.rearrange([], [[own]], [5])
    assert batch.caches[0].keys is own.keys


def test_states_follow_their_rows() -> None:
    def state(number: int) -> Any:
        cache = ArraysCache(size=2)
        cache[0], cache[1] = mx.full((1, 3), number), mx.full((1, 2, 2), -number)
        return [CacheList(cache)]

    batch = CacheBatch([CacheList(ArraysCache(size=2))])
    rows = [1, 2, 3]
    for leaving, joining in (([], [1, 2, 3]), ([0], [4]), ([1], []), ([], [5, 6]), ([0, 1, 2], [7])):
        old = [] if batch.lengths == [] else rows
        order = batch.rearrange(leaving, [state(number) for number in joining], [1] * len(joining))
        everybody = [*old, *joining]
        rows = [everybody[row] for row in order]
        held = batch.caches[0][0]
        assert held[0][:, 0].tolist() == rows
        assert held[1][:, 0, 0].tolist() == [-row for row in rows]


def test_a_state_that_is_taken_out_keeps_nothing_of_the_batch_alive() -> None:
    def state() -> list[Any]:
        cache = ArraysCache(size=1)
        cache[0] = mx.ones((1, 2**18))
        return [cache]

    batch = CacheBatch(state())
    batch.rearrange([], [state() for _ in range(8)], [1] * 8)
    mx.eval(batch.state)
    [own] = batch.extract(3, [ArraysCache(size=1)])
    mx.eval(own.state[0])
    before = mx.get_active_memory()
    del batch
    assert before - mx.get_active_memory() >= 8 * 2**20


def test_rows_of_unequal_lengths_take_little_more_than_alone() -> None:
    rows = _Rows(KVCache)
    for _ in range(60):
        leaving = [0] if len(rows.tokens) > 5 else []
        rows.rearrange(leaving, [rows.random.choice([20, 80, 300])])
        rows.step()
        token_bytes = HEADS * WIDTH * 4 * 2
        alone = sum(_capacity(len(tokens)) for tokens in rows.tokens) * token_bytes
        assert rows.batch.nbytes <= 1.4 * alone


def test_largest_position_is_known_without_reading_an_array() -> None:
    """mlx-vlm's models read the array if there is no `_offset`, before a step can be dispatched."""
    rows = _Rows(KVCache)
    rows.rearrange([], [3, 9])
    [cache] = rows.batch.caches
    rows.batch.begin([1, 1], may_revert=False)
    assert cache_position_offset(cache) == cache._offset == 9
    cache.update_and_fetch(_vectors([[1], [2]]), -_vectors([[1], [2]]))
    assert cache_position_offset(cache) == cache.offset.max().item() == 10


@pytest.mark.parametrize(
    "make", [lambda: ChunkedKVCache(chunk_size=8), lambda: RotatingKVCache(max_size=8, keep=4)]
)
def test_unbatchable_caches_raise_value_error(make: Any) -> None:
    with pytest.raises(ValueError, match="unequal lengths"):
        CacheBatch([KVCache(), CacheList(make())])
