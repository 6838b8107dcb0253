"""How likely tokens are, and which were the likeliest: read from logits, by the model alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from worker.contract import Likelihood
from worker.engine.sampling.ranking import leading, normalizer


@dataclass(frozen=True, slots=True)
class Report:
    """The likelihoods of one token for each of some rows of logits. Lazy: nothing is evaluated.

    `asked`: how many tokens beside that one each is to have. `arrays`: of the tokens [rows, 1], and if any
    row asks for more the likeliest tokens and theirs [rows, most asked].
    """

    asked: Sequence[int]
    arrays: list[mx.array]

    @classmethod
    def of(cls, logits: mx.array, tokens: mx.array, asked: Sequence[int]) -> Report:
        """From `logits` [rows, vocabulary] and `tokens` [rows]."""
        logits = logits.astype(mx.float32)
        total = normalizer(logits)
        arrays = [mx.take_along_axis(logits, tokens[:, None], axis=-1) - total]
        if width := max(asked):
            top, values = leading(logits, width)
            arrays += [top, values - total]
        return cls(asked, arrays)

    def read(self) -> Iterator[Likelihood]:
        """In the order of the rows. Waits for what is not computed yet."""
        chosen, *top = [cast("list[list[Any]]", array.tolist()) for array in self.arrays]
        tokens, values = top or ([[]] * len(chosen),) * 2
        for place, count in enumerate(self.asked):
            pairs = zip(tokens[place][:count], values[place][:count], strict=True)
            yield Likelihood(chosen[place][0], tuple(pairs))
