"""What a row's caches will take in bytes, known from their shapes before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.caches.batch import RowCaches, leaf_caches
from worker.engine.caches.grouping import columns_for


@dataclass(frozen=True, slots=True)
class RowCost:
    """`growing`: for each layer that keeps its tokens, bytes for one of them and the most it keeps."""

    fixed: int
    growing: tuple[tuple[int, int | None], ...]

    def __call__(self, tokens: int) -> int:
        """Bytes for a row of so many tokens."""
        columns = columns_for(tokens)
        return self.fixed + sum(
            each * (columns if most is None else min(columns, most)) for each, most in self.growing
        )


def row_cost(model: nn.Module, caches: RowCaches | None = None) -> RowCost:
    """Found from one token that is fed, but never evaluated. `caches`: empty ones of a single row."""
    caches = make_prompt_cache(model) if caches is None else caches
    model(mx.array([[0]], mx.uint32), cache=caches)
    fixed, growing = 0, []
    for cache in leaf_caches(caches):
        if not hasattr(cache, "update_and_fetch"):
            fixed += cache.nbytes
        elif not cache.empty():
            leaf = cache.keys[0] if isinstance(cache.keys, (tuple, list)) else cache.keys
            most = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
            growing.append((cache.nbytes // leaf.shape[2], most))
    return RowCost(fixed, tuple(growing))
