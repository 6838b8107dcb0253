"""Logprobs of sampled tokens, of the top tokens, and of prompts, from the logits of the model alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.runner.kv.batch import RowCaches
from worker.runner.sampling.distribution import leading, normalizer
from worker.values import Logprob, LogprobTargets

LOGITS_MAX = 2**24
"""Logits of one piece: 64 MiB of float32, and a few times that while the top tokens are computed."""


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """Logprobs of one token for each of some rows of logits. Lazy: nothing is evaluated.

    `asked`: number of top tokens for each row. `arrays`: the tokens' logprobs, [rows, 1]; if any row asks for
    top tokens, also these and their logprobs, [rows, highest count].
    """

    asked: Sequence[int]
    arrays: list[mx.array]

    @classmethod
    def of(cls, logits: mx.array, tokens: mx.array, asked: Sequence[int]) -> LogprobReport:
        """Make a report from `logits`, [rows, vocabulary], and `tokens`, [rows]."""
        logits = logits.astype(mx.float32)
        total = normalizer(logits)
        arrays = [mx.take_along_axis(logits, tokens[:, None], axis=-1) - total]
        if width := max(asked):
            top, values = leading(logits, width)
            arrays += [top, values - total]
        return cls(asked, arrays)

    def read(self) -> Iterator[Logprob]:
        """Yield the logprobs in the order of the rows. Waits for what is not computed yet."""
        chosen, *top = [cast("list[list[Any]]", array.tolist()) for array in self.arrays]
        tokens, values = top or ([[]] * len(chosen),) * 2
        for place, count in enumerate(self.asked):
            pairs = zip(tokens[place][:count], values[place][:count], strict=True)
            yield Logprob(chosen[place][0], tuple(pairs))


def piece_tokens(model: nn.Module) -> int:
    """Return the number of positions in a piece. Takes the size of the logits from a lazy call that is never
    run."""
    logits = model(mx.array([[0]], mx.uint32), cache=make_prompt_cache(model))
    return max(1, LOGITS_MAX // int(logits.shape[-1]))


def prefill_scored(
    model: nn.Module, chunk: Sequence[int], caches: RowCaches, targets: LogprobTargets, size: int
) -> list[Logprob]:
    """Run a chunk of a row in pieces of `size` tokens; return the logprobs of its targets. Evaluates both.

    The logits of a chunk never exist all at once: with a vocabulary of 152,000 those of 2048 positions take
    more than a gigabyte. So only the requested logprobs are kept of each piece.
    """
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
