"""Quantization of a row's KV caches, as upstream's `maybe_quantize_kv_cache` does it."""

from __future__ import annotations

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.runner.kv.batch import RowCaches
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
