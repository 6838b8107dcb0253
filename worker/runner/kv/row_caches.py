"""Empty caches of a single row, quantized or not, and what a row costs, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.runner.kv.batch import RowCaches, leaf_caches
from worker.runner.kv.buckets import FED_MAX, capacity
from worker.runner.kv.single import grows, is_positional
from worker.runner.trees import held_bytes
from worker.values import KVQuantization


def quantized(caches: RowCaches, settings: KVQuantization) -> RowCaches:
    """Return the caches of a row with its KV layers quantized. All others stay as they are, among them those
    that a model keeps several of for one layer."""
    return [
        cache.to_quantized(group_size=settings.group_size, bits=settings.bits)
        if hasattr(cache, "to_quantized")
        else cache
        for cache in caches
    ]


def fresh_caches(model: nn.Module, settings: KVQuantization | None = None) -> RowCaches:
    """Return empty caches of a row. `settings`: it is quantized, from its first token on."""
    caches: RowCaches = make_prompt_cache(model)
    return caches if settings is None else quantized(caches, settings)


_MORE_TOKENS = 1024
"""Tokens fed to a row, but never evaluated, to measure the growth of its caches."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """Cost of a row's caches. `growing`: for each layer that stores tokens, bytes per token and maximum
    tokens."""

    fixed: int
    growing: tuple[tuple[int, int | None], ...]

    def __call__(self, tokens: int) -> int:
        """Return the bytes for a row of `tokens` tokens."""
        columns = capacity(tokens)
        return self.fixed + sum(
            each * (columns if most is None else min(columns, most)) for each, most in self.growing
        )


def row_cost(model: nn.Module, caches: RowCaches | None = None) -> RowCost:
    """Measure a model's row cost with a token that is fed, but never evaluated. `caches`: empty, of a single
    row."""
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
            window = getattr(cache, "max_size", None)
            most = window - 1 + FED_MAX if window else getattr(cache, "chunk_size", None)
            growing.append((cache.nbytes // leaf.shape[2], most))
    if strange:
        before = sum(map(held_bytes, strange))
        model(mx.zeros((1, _MORE_TOKENS), mx.uint32), cache=caches)
        growing.append((-(-(sum(map(held_bytes, strange)) - before) // _MORE_TOKENS), None))
    return RowCost(fixed, tuple(growing))


def is_strange(cache: Any) -> bool:
    """Return whether the cache is of an unknown kind, whose growth must be measured."""
    is_known = is_positional(cache) or any(hasattr(cache, bound) for bound in ("max_size", "chunk_size"))
    return not hasattr(cache, "nbytes") or (grows(cache) and not is_known)
