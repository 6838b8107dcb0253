"""Verification of drafts (speculative decoding): which tokens of a pass over drafts are accepted.

A row is fed its *backlog*, the accepted tokens that its caches lack, and a draft of what follows. The tokens
behind these are sampled one position after the other, each as it would be without drafts, once the token
before it is known. A draft token equal to the sample makes the next position known as well. So the output is
identical with and without drafts, whatever a sample depends on.

The host reads each sample before the next; nothing runs meanwhile. That costs a row only the pause, and saves
it forward passes. Where no row's sample depends on the tokens before it (greedy ones, for instance), all
columns are sampled at once and read once; what follows a rejected draft token is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from worker.common_prefix import common_prefix_length
from worker.runner.sampling.grammar_masks import MaskThreads
from worker.runner.sampling.sampler import Agree, Sampler
from worker.runner.sampling.state import SamplingState
from worker.values import SampledToken

DRAWN_VALUES_MAX = 4 * 2**20
"""Logits in a verify pass up to which tokens that are not greedy are sampled all at once: beyond, sampling
columns that are mostly ignored costs too much."""


@dataclass(slots=True)
class AcceptedTokens:
    """The accepted tokens of a row in a step. `failure`: why it produces no more."""

    drawn: list[SampledToken] = field(default_factory=list)
    failure: Exception | None = None


@dataclass(frozen=True, slots=True)
class FedRow:
    """A row in a verify pass. `length`: tokens of its sequence, the backlog included. `guess`: its draft."""

    sampling: SamplingState
    length: int
    backlog: Sequence[int]
    guess: Sequence[int]


class Verifier:
    """Samples the accepted tokens of the rows of a batch. Built anew whenever the rows change."""

    def __init__(self, sampler: Sampler, agree: Agree | None) -> None:
        """`sampler`: of the rows. `agree`: see `Sampler`."""
        self._sampler = sampler
        self._agree = agree
        self._wide: dict[int, Sampler] = {}
        """Samplers of all columns of all rows, by width."""

    def accepted(
        self, logits: mx.array, rows: Sequence[FedRow], helpers: MaskThreads
    ) -> list[AcceptedTokens]:
        """Return the accepted tokens of each row, from the logits of its pass, [rows, width, vocabulary]: at
        least one, unless it fails."""
        if self._is_drawn_at_once(logits):
            return self._drawn_at_once(logits, rows)
        found = [AcceptedTokens() for _ in rows]
        places = [len(fed.backlog) - 1 for fed in rows]
        going = [True] * len(rows)
        while any(going):
            self._draw(logits, rows, places, going, found, helpers)
            for row, (each, fed) in enumerate(zip(found, rows, strict=True)):
                count = len(each.drawn)
                going[row] = (
                    going[row]
                    and each.failure is None
                    and count <= len(fed.guess)
                    and each.drawn[-1].token == fed.guess[count - 1]
                )
                places[row] += going[row]
        return found

    def _is_drawn_at_once(self, logits: mx.array) -> bool:
        is_little = self._sampler.is_greedy or logits.size <= DRAWN_VALUES_MAX
        return is_little and self._sampler.is_memoryless

    def _drawn_at_once(self, logits: mx.array, rows: Sequence[FedRow]) -> list[AcceptedTokens]:
        width, begins = logits.shape[1], [len(fed.backlog) - 1 for fed in rows]
        if width not in self._wide:
            self._wide[width] = Sampler([fed.sampling for fed in rows for _ in range(width)], self._agree)
        positions = [
            max(0, fed.length + column - begin)
            for fed, begin in zip(rows, begins, strict=True)
            for column in range(width)
        ]
        sampled = self._wide[width](logits.reshape(-1, logits.shape[-1]), positions)
        tokens: Any = sampled.tokens.tolist()
        likelihoods = sampled.likelihoods()
        found = []
        for row, (fed, begin) in enumerate(zip(rows, begins, strict=True)):
            first = row * width + begin
            right = common_prefix_length(fed.guess, tokens, first)
            places = range(first, first + right + 1)
            drawn = [SampledToken(tokens[place], likelihoods.get(place)) for place in places]
            found.append(AcceptedTokens(drawn))
            for token, _ in drawn:
                fed.sampling.accept_token(token)
        return found

    def _draw(
        self,
        logits: mx.array,
        rows: Sequence[FedRow],
        places: list[int],
        going: Sequence[bool],
        found: list[AcceptedTokens],
        helpers: MaskThreads,
    ) -> None:
        """Sample the next token of each row that is `going`, from the logits at its place."""
        chosen: mx.array = mx.take_along_axis(logits, mx.array(places)[:, None, None], axis=1)[:, 0]
        positions = [fed.length + len(each.drawn) for fed, each in zip(rows, found, strict=True)]
        before = [
            each.drawn[-1].token if each.drawn else fed.backlog[-1]
            for fed, each in zip(rows, found, strict=True)
        ]
        drawing = self._sampler.begin(chosen, positions, mx.array(before, mx.uint32), going)
        helpers.run(drawing.questions)
        sampled = self._sampler.finish(drawing, going)
        tokens: Any = sampled.tokens.tolist()
        likelihoods = sampled.likelihoods()
        for row, (token, fed, each) in enumerate(zip(tokens, rows, found, strict=True)):
            if not going[row]:
                continue
            if (failure := fed.sampling.failure) is not None:
                each.failure = failure
                continue
            fed.sampling.accept_token(token)
            each.drawn.append(SampledToken(token, likelihoods.get(row)))
