"""Probe of quantized KV caches: a model that does not support them is refused at its start."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.interfaces import ModelError
from worker.runner.kv.capability_probe import REFUSALS, first_sentence
from worker.runner.kv.quantized import fresh_caches
from worker.values import KVQuantization

_CHUNKS = ((3, 1, 4, 1, 5), (9, 2), (6,))


def require_quantizable(model: nn.Module, settings: KVQuantization, name: str) -> None:
    """Run a few tokens on quantized caches. Raises `ModelError` if the model's caches or its attention, which
    are upstream's, do not support them."""
    able = [cache for cache in make_prompt_cache(model) if hasattr(cache, "to_quantized")]
    if not able:
        why = "none of its layers has a KV cache that mlx-lm can quantize"
    elif any(hasattr(cache, "max_size") for cache in able):
        why = "mlx-lm cannot quantize those of its sliding-window layers"
    else:
        why = _refusal(model, settings)
    if why:
        asked = f"--kv-bits {settings.bits} with --kv-group-size {settings.group_size}"
        raise ModelError(f"{name}: {asked}: its KV caches cannot be quantized: {why}.")


def _refusal(model: nn.Module, settings: KVQuantization) -> str:
    """Return why the model cannot run on quantized caches; empty: it can."""
    try:
        caches = fresh_caches(model, settings)
        for tokens in _CHUNKS:
            mx.eval(model(mx.array([tokens], mx.uint32), cache=caches), [cache.state for cache in caches])
    except REFUSALS as error:
        return first_sentence(error).removesuffix(".")
    return ""
