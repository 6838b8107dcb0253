"""How likely the tokens of a prompt are: asked while a chunk of it is prefilled.

The logits of a chunk are never all there: with a vocabulary of 152,000 those of 2048 positions take more than
a gigabyte. So the chunk is run in pieces, and only the numbers that were asked for are kept of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.contract import Likelihood, Targets
from worker.engine.caches.batch import RowCaches
from worker.engine.sampling.report import Report

LOGITS_MAX = 2**24
"""Of one piece: 64 MiB of float32, and a few times that while the likeliest are sought."""


def piece_tokens(model: nn.Module) -> int:
    """How many positions a piece has. The model is asked for the size of its logits, and runs nothing."""
    logits = model(mx.array([[0]], mx.uint32), cache=make_prompt_cache(model))
    return max(1, LOGITS_MAX // int(logits.shape[-1]))


def prefill_scored(
    model: nn.Module, chunk: Sequence[int], caches: RowCaches, targets: Targets, size: int
) -> list[Likelihood]:
    """Run a chunk of a row in pieces of `size` tokens; the likelihoods of its targets. Evaluates both."""
    found: list[Likelihood] = []
    silent = len(chunk) - len(targets.tokens)
    """So many positions at the beginning are asked nothing."""
    for first in range(0, len(chunk), size):
        piece = list(chunk[first : first + size])
        logits = model(mx.array([piece], mx.uint32), cache=caches)[0]
        states = [cache.state for cache in caches]
        skipped = max(silent - first, 0)
        if skipped >= len(piece):
            mx.eval(states)
            continue
        tokens = targets.tokens[first + skipped - silent : first + len(piece) - silent]
        report = Report.of(logits[skipped:], mx.array(tokens, mx.uint32), [targets.top] * len(tokens))
        mx.eval(report.arrays, states)
        found += report.read()
    return found
