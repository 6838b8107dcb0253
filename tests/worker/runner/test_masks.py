"""Sampling under masks: only allowed tokens are drawn, and filters ignore all others, whatever the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from tests.worker.rules import Unforeseeing
from tests.worker.runner.sampling.test_filters import FILTERS, upstream_logprobs
from tests.worker.runner.sampling.test_sampler import VOCABULARY, WAYS, drawn, random_logits
from worker.runner.sampling.grammar_masks import GuidedRow, Masks
from worker.values import SamplingParams


@dataclass(frozen=True)
class Only(Unforeseeing):
    """A grammar and its guide: only these tokens are ever allowed."""

    tokens: tuple[int, ...]

    def open(self, answered: Sequence[int]) -> Only:
        return self

    def accept_token(self, token: int) -> None:
        pass

    def fill(self, mask: memoryview) -> bool:
        for token in self.tokens:
            mask[token // 32] |= 1 << token % 32
        return True


SOME = tuple(range(5, VOCABULARY, 7))


def test_only_what_may_follow_counts_for_filters() -> None:
    logits = 3 * mx.random.normal((1, VOCABULARY), key=mx.random.key(1))
    may = np.isin(np.arange(VOCABULARY), SOME)
    masked = mx.where(mx.array(may), logits, -mx.inf)
    for way in FILTERS:
        # At this temperature the remaining tokens are almost equally likely: every one of them is drawn.
        draws = [replace(way, seed=seed, temperature=1e4, grammar=Only(SOME)) for seed in range(500)]
        tokens = drawn(draws, mx.broadcast_to(logits, (len(draws), VOCABULARY)))
        kept = np.flatnonzero(np.array(upstream_logprobs(masked, way))[0] > -np.inf)
        assert sorted(set(tokens)) == kept.tolist(), way


@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.bfloat16)])
def test_greedy_rows_draw_the_likeliest_that_may_follow(dtype: mx.Dtype) -> None:
    # Small logits in a narrow type: many round to the same log-probability, as they do upstream.
    logits = (0.01 * random_logits(64, vocabulary=4000)).astype(dtype)
    draws = [
        SamplingParams(grammar=Only(tuple(range(row, 4000, 64)))) if row % 3 else SamplingParams()
        for row in range(64)
    ]
    rows, tokens = np.arange(64)[:, None], np.arange(4000)
    may = mx.array((rows % 3 == 0) | (tokens % 64 == rows))
    masked = mx.where(may, logits, -mx.inf)
    expected = mx.argmax(masked - mx.logsumexp(masked, axis=-1, keepdims=True), axis=-1)
    assert drawn(draws, logits) == expected.tolist()


def test_a_mask_is_set_behind_bias_and_penalties() -> None:
    logits = mx.broadcast_to(mx.arange(VOCABULARY, dtype=mx.float32), (3, VOCABULARY))
    draws = [
        SamplingParams(grammar=Only((7, 8)), logit_bias=((9, 1000.0), (7, 50.0))),
        SamplingParams(grammar=Only((3, 8)), frequency_penalty=1e5),  # 3 is in the answer
        SamplingParams(grammar=Only((3, 8)), logit_bias=((8, -math.inf),)),
    ]
    assert drawn(draws, logits) == [7, 8, 3]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["all", "what may follow", "what may not"])
def test_no_logits_make_a_row_draw_what_may_not_follow(poison: float, where: str) -> None:
    may = np.isin(np.arange(VOCABULARY), SOME)
    held = [replace(way, grammar=Only(SOME)) for way in WAYS]
    draws = [sampling for pair in zip(held, WAYS, strict=True) for sampling in pair]
    logits = np.array(random_logits(len(draws)))
    clean = drawn(draws, mx.array(logits))
    poisoned = {"all": np.full(VOCABULARY, True), "what may follow": may, "what may not": ~may}[where]
    logits[::2, poisoned] = poison
    tokens = drawn(draws, mx.array(logits))
    assert set(tokens[::2]) <= set(SOME)
    assert set(clean[::2]) <= set(SOME)
    assert tokens[1::2] == clean[1::2]


@pytest.mark.parametrize("vocabulary", [1, 32, 33, 100])
def test_a_mask_is_as_wide_as_the_logits_and_no_wider(vocabulary: int) -> None:
    class All(Only):
        def fill(self, mask: memoryview) -> bool:
            assert mask.tolist() == [0] * -(-vocabulary // 32)
            mask[-1] = 2**32 - 1
            return True

    masks, held = Masks(2), GuidedRow(All(()))
    for _ in range(2):
        masks.clear(vocabulary)
        masks.ask(1, held)
        mask = masks.gather()
        assert mask is not None
        last = (vocabulary - 1) // 32 * 32
        masked = [0.0 if token >= last else -math.inf for token in range(vocabulary)]
        assert mask.apply(mx.zeros((2, vocabulary))).tolist() == [[0.0] * vocabulary, masked]
        assert mask.keep(mx.zeros(2, mx.uint32)).tolist() == [0, last]
