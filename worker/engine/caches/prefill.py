"""Batched prefill on upstream's batch caches: whole prompts, padded on the right, or a chunk of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.caches.batch import RowCaches

Chunks = Mapping[str, Sequence[int]]


def prefill_together(model: nn.Module, prompts: Chunks) -> dict[str, RowCaches]:
    """Return each row's own caches after its prompt, lazily. The rows must be new.

    Raises what upstream's caches raise if they cannot leave padding out.
    """
    return prefill_abreast(model, prompts, {row: make_prompt_cache(model) for row in prompts})


def prefill_abreast(
    model: nn.Module, chunks: Chunks, before: Mapping[str, RowCaches]
) -> dict[str, RowCaches]:
    """Run a chunk of each row, whose caches are in `before`: all at one position, with chunks of one
    length."""
    lengths = [len(tokens) for tokens in chunks.values()]
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    layers = zip(*(before[row] for row in chunks), strict=True)
    caches = [layer[0].merge(list(layer)) for layer in layers]
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    padded = [[*tokens, *[0] * pad] for tokens, pad in zip(chunks.values(), padding, strict=True)]
    model(mx.array(padded, mx.uint32), cache=caches)
    for cache in caches:
        cache.finalize()
    return {row: [cache.extract(index) for cache in caches] for index, row in enumerate(chunks)}
