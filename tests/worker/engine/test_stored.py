"""What is stored of a row, where a file was not what it said."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from worker.contract import Piece
from worker.engine.caches.stored import Columns, States, rebuild


def test_a_piece_that_is_no_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="no columns: States"):
        rebuild([KVCache()], [Piece(States(()), 0, 4, 4)], None)


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no states: Columns"):
        rebuild([ArraysCache(1)], [Piece(Columns(()), 0, 4, 4)], Columns(()))
