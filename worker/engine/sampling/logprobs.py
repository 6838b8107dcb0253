"""Logprobs of sampled tokens and of the top tokens, from the model's logits alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from worker.contract.engine import Logprob
from worker.engine.sampling.ranking import leading, normalizer


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
