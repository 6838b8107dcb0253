"""Prompt logprobs, computed while a chunk of the prompt is prefilled.

The logits of a chunk never exist all at once: with a vocabulary of 152,000 those of 2048 positions take more
than a gigabyte. So the chunk is run in pieces, and only the requested logprobs are kept of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.contract.engine import Logprob, LogprobTargets
from worker.engine.caches.batch import RowCaches
from worker.engine.sampling.logprobs import LogprobReport

LOGITS_MAX = 2**24
"""Logits of one piece: 64 MiB of float32, and a few times that while the top tokens are computed."""


def piece_tokens(model: nn.Module) -> int:
    """Return the number of positions in a piece. Takes the size of the logits from a lazy call that is never
    run."""
    logits = model(mx.array([[0]], mx.uint32), cache=make_prompt_cache(model))
    return max(1, LOGITS_MAX // int(logits.shape[-1]))


def prefill_scored(
    model: nn.Module, chunk: Sequence[int], caches: RowCaches, targets: LogprobTargets, size: int
) -> list[Logprob]:
    """Run a chunk of a row in pieces of `size` tokens; return the logprobs of its targets. Evaluates both."""
    found: list[Logprob] = []
    silent = len(chunk) - len(targets.tokens)
    """Leading positions without targets."""
    for first in range(0, len(chunk), size):
        piece = list(chunk[first : first + size])
        logits = model(mx.array([piece], mx.uint32), cache=caches)[0]
        states = [cache.state for cache in caches]
        skipped = max(silent - first, 0)
        if skipped >= len(piece):
            mx.eval(states)
            continue
        tokens = targets.tokens[first + skipped - silent : first + len(piece) - silent]
        report = LogprobReport.of(logits[skipped:], mx.array(tokens, mx.uint32), [targets.top] * len(tokens))
        mx.eval(report.arrays, states)
        found += report.read()
    return found
