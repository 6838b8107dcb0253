"""Several short prompts in one forward pass, padded on the right, on upstream's batch caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.caches.batch import RowCaches


def prefill_together(model: nn.Module, prompts: Mapping[str, Sequence[int]]) -> dict[str, RowCaches]:
    """Each row's own caches after its prompt, lazily. No row may have been run before.

    Raises what upstream's caches raise where they cannot leave padding out.
    """
    lengths = [len(tokens) for tokens in prompts.values()]
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    single = [make_prompt_cache(model) for _ in prompts]
    caches = [layer[0].merge(list(layer)) for layer in zip(*single, strict=True)]
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    padded = [[*tokens, *[0] * pad] for tokens, pad in zip(prompts.values(), padding, strict=True)]
    model(mx.array(padded, mx.uint32), cache=caches)
    for cache in caches:
        cache.finalize()
    return {row: [cache.extract(index) for cache in caches] for index, row in enumerate(prompts)}
