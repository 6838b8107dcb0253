"""What a row's caches will take in bytes, known from their shapes before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.caches.batch import RowCaches, leaf_caches
from worker.engine.caches.grouping import columns_for
from worker.engine.trees import held_bytes

_MORE_TOKENS = 1024
"""Fed to a row, never evaluated, to see how much its caches grow."""


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
    fixed, growing, strange = 0, list[tuple[int, int | None]](), []
    for cache in leaf_caches(caches):
        if is_strange(cache):
            strange.append(cache)
            fixed += held_bytes(cache)
        elif not hasattr(cache, "update_and_fetch"):
            fixed += cache.nbytes
        elif not cache.empty():
            leaf = cache.keys[0] if isinstance(cache.keys, (tuple, list)) else cache.keys
            most = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
            growing.append((cache.nbytes // leaf.shape[2], most))
    if strange:
        before = sum(map(held_bytes, strange))
        model(mx.zeros((1, _MORE_TOKENS), mx.uint32), cache=caches)
        growing.append((-(-(sum(map(held_bytes, strange)) - before) // _MORE_TOKENS), None))
    return RowCost(fixed, tuple(growing))


def is_strange(cache: Any) -> bool:
    """Whether it is none of the kinds that say how they grow."""
    grows = hasattr(cache, "update_and_fetch")
    return not hasattr(cache, "nbytes") or (
        grows and not (hasattr(cache, "keys") and hasattr(cache, "empty"))
    )
