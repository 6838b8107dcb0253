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

from worker.engine.caches import grouping
from worker.engine.caches.batch import CacheBatch

HEADS, WIDTH = 2, 32
STEP = 4
"""Growth step of the buffers, small so that they are outgrown often."""


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "COLUMNS_STEP", STEP)
    monkeypatch.setattr(KVCache, "step", STEP)
    monkeypatch.setattr(RotatingKVCache, "step", STEP)


class _Rows:
    """Drives a batch of one layer and the reference. A token is the value that fills its vectors."""

    def __init__(self, make: Any, slack: int = 0) -> None:
        self.make = make
        self.random = random.Random(slack)
        self.batch = CacheBatch([make()], slack)
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

    def step(self) -> None:
        cache = self.batch.caches[0]
        new = [self.new_tokens(1)[0] for _ in self.tokens]
        assert cache.offset.tolist() == [len(tokens) for tokens in self.tokens]
        mask = cache.make_mask(1)
        keys, values = cache.update_and_fetch(_vectors([[t] for t in new]), -_vectors([[t] for t in new]))
        assert cache.offset.tolist() == [len(tokens) + 1 for tokens in self.tokens]
        for tokens, token in zip(self.tokens, new, strict=True):
            tokens.append(token)
        self.check(mask, _read(keys, cache), _read(values, cache))
        self.batch.advance()
        mx.eval(self.batch.state)

    def check(self, mask: mx.array | None, keys: np.ndarray, values: np.ndarray) -> None:
        assert keys.shape[0] == len(self.tokens)
        window = getattr(self.make(), "max_size", None)
        for row, tokens in enumerate(self.tokens):
            seen = np.ones(keys.shape[2], bool) if mask is None else np.array(mask[row, 0, 0])
            assert (keys[row] == keys[row, :1, :, :1]).all()
            assert (values[row] == -keys[row]).all()
            assert sorted(keys[row, 0, seen, 0].tolist()) == (tokens if window is None else tokens[-window:])


def _vectors(rows: Sequence[Sequence[int]]) -> mx.array:
    numbers = mx.array(rows, mx.float32)[:, None, :, None]
    return mx.broadcast_to(numbers, (len(rows), HEADS, len(rows[0]), WIDTH))


def _read(leaf: Any, cache: Any) -> np.ndarray:
    if isinstance(leaf, tuple):
        leaf = mx.dequantize(*leaf, group_size=cache.group_size, bits=cache.bits)
    return np.array(leaf)


KINDS = {
    "all tokens": KVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
    **{f"window of {size}": lambda size=size: RotatingKVCache(max_size=size) for size in (2, 7)},
}


@pytest.mark.parametrize("slack", [0, 5 * STEP, 50 * STEP])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_sees_its_own_tokens_and_nothing_else(kind: str, slack: int) -> None:
    rows = _Rows(KINDS[kind], slack)
    for _ in range(30):
        leaving = [row for row in range(len(rows.tokens)) if rows.random.random() < 0.15]
        joining = rows.random.choices([0, 1, 2, 4], [6, 3, 1, 1])[0]
        lengths = [rows.random.choice([0, 1, 2, 5, 9, 17, 40]) for _ in range(joining)]
        if leaving or joining:
            rows.rearrange(leaving, lengths)
        for _ in range(rows.random.randint(0, 5)):
            if rows.tokens:
                rows.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_taken_out_as_it_would_be_alone_and_stays_as_it_was(kind: str) -> None:
    rows = _Rows(KINDS[kind])
    rows.rearrange([], [3, 11, 1, 30])
    for _ in range(9):
        rows.step()
    taken = [rows.batch.extract(row, [rows.make()])[0] for row in range(4)]
    before = [[*tokens] for tokens in rows.tokens]
    for _ in range(5):
        rows.step()
    for cache, tokens in zip(taken, before, strict=True):
        alone = rows.row_of(tokens)
        assert cache.offset == alone.offset == len(tokens)
        token = rows.new_tokens(1)
        ours, theirs = (
            _read(each.update_and_fetch(_vectors([token]), -_vectors([token]))[0], each)
            for each in (cache, alone)
        )
        assert sorted(ours[0, 0, :, 0].tolist()) == sorted(theirs[0, 0, :, 0].tolist())


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


@pytest.mark.parametrize("slack", [0, 40 * STEP])
def test_room_is_bounded_while_rows_come_and_go(slack: int) -> None:
    rows = _Rows(KVCache, slack)
    for _ in range(60):
        leaving = [0] if len(rows.tokens) > 5 else []
        rows.rearrange(leaving, [rows.random.choice([20, 24, 28])])
        rows.step()
        token_bytes = HEADS * WIDTH * 4 * 2
        widest = max(len(tokens) for tokens in rows.tokens) + STEP
        columns = grouping.EMPTY_MAX * len(rows.tokens) * widest + widest
        assert rows.batch.nbytes <= columns * token_bytes


@pytest.mark.parametrize(
    ("slack", "changes"), [(0, [([0], [])] * 36), (30 * STEP, [([], [7])] * 20)], ids=["leaving", "joining"]
)
def test_buffer_is_seldom_copied_when_rows_change_one_after_another(slack: int, changes: Any) -> None:
    rows = _Rows(KVCache, slack)
    rows.rearrange([], [8] * 40)
    sizes = set()
    for leaving, joining in changes:
        rows.rearrange(leaving, joining)
        sizes.add(rows.batch.nbytes)
    assert len(sizes) <= 16
    rows.step()


def test_largest_position_is_known_without_reading_an_array() -> None:
    """mlx-vlm's models read the array if there is no `_offset`, before a step can be dispatched."""
    rows = _Rows(KVCache)
    rows.rearrange([], [3, 9])
    [cache] = rows.batch.caches
    assert cache_position_offset(cache) == cache._offset == 9
    cache.update_and_fetch(_vectors([[1], [2]]), -_vectors([[1], [2]]))
    assert cache_position_offset(cache) == cache.offset.max().item() == 10


@pytest.mark.parametrize(
    "make", [lambda: ChunkedKVCache(chunk_size=8), lambda: RotatingKVCache(max_size=8, keep=4)]
)
def test_unbatchable_caches_raise_value_error(make: Any) -> None:
    with pytest.raises(ValueError, match="unequal lengths"):
        CacheBatch([KVCache(), CacheList(make())])
