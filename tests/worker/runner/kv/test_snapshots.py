"""Cache snapshots: those of another kind, and the way from a file to a row."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from worker.core.prefix.folder import Record, prepare, read_record
from worker.runner.kv.buckets import capacity
from worker.runner.kv.single import whole_buffers
from worker.runner.kv.snapshots import KVSlice, StateSnapshot, allocate, columns_of, pack, rebuild, unpack
from worker.runner.trees import arrays_of
from worker.values import CacheSegment


def test_a_piece_that_is_no_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="not a KV slice: StateSnapshot"):
        rebuild([KVCache()], [CacheSegment(StateSnapshot(()), 0, 4, 4)], None)


def test_a_file_is_read_into_the_arrays_and_copied_once_into_the_buffers_of_the_row(tmp_path: Path) -> None:
    caches = [KVCache(), QuantizedKVCache(group_size=32, bits=8), RotatingKVCache(max_size=64)]
    for number, cache in enumerate(caches):
        keys = mx.random.normal((1, 2, 100, 32), key=mx.random.key(number))
        for first in range(0, 100, 40):
            cache.update_and_fetch(keys[:, :, first : first + 40], -keys[:, :, first : first + 40])
    pieces = []
    for first, last in ((0, 60), (60, 100)):
        blobs, rest = pack(columns_of(caches, 0, first, last)[0])
        path = tmp_path / f"{first}"
        with path.open("wb") as file:
            prepare(Record("0" * 8, {}, blobs), "f1").write(file)
        buffer = allocate(path.stat().st_size)
        read = unpack(read_record(path, "f1", "0" * 8, buffer).blobs, rest)
        assert isinstance(read, KVSlice)
        pieces.append(CacheSegment(read, first, last, last - first))
        for name, leaf in arrays_of(read.layers).items():
            assert bytes(memoryview(leaf.reshape(-1).view(mx.uint8))) == bytes(blobs[name].data)
    buffer[:8] = b"\xff" * 8
    assert any(mx.isnan(leaf).any() or (leaf == 2**32 - 1).any() for leaf in arrays_of(read.layers).values())
    again = [KVCache(), QuantizedKVCache(group_size=32, bits=8)]
    rebuild(again, pieces[:1], None, expected=700)
    for restored, cache in zip(again, caches, strict=False):
        leaves, whole = whole_buffers(restored), whole_buffers(cache)
        assert {leaf.shape[2] for leaf in leaves} == {capacity(700)}
        for leaf, original in zip(leaves, whole, strict=True):
            assert mx.array_equal(leaf[:, :, :60], original[:, :, :60])
