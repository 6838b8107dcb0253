"""Cache snapshots whose file does not match its metadata."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import KVCache

from worker.runner.kv.snapshots import StateSnapshot, rebuild
from worker.values import CacheSegment


def test_a_piece_that_is_no_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="not a KV slice: StateSnapshot"):
        rebuild([KVCache()], [CacheSegment(StateSnapshot(()), 0, 4, 4)], None)
