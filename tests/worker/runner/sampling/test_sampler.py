"""The sampler against upstream's greedy one, against statistics, and against itself in other batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import greedy_sampler

from worker.runner.sampling.sampler import Sampler
from worker.runner.sampling.state import SamplingState
from worker.values import SamplingParams

VOCABULARY = 300
WAYS = [
    SamplingParams(),
    SamplingParams(seed=1, temperature=1.0),
    SamplingParams(seed=2, temperature=1.0, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(seed=3, temperature=0.8, top_p=0.9, min_p=0.01),
    SamplingParams(seed=4, temperature=0.8, top_k=280),
    SamplingParams(seed=5, temperature=0.8, top_k=40, repetition_penalty=1.2, presence_penalty=0.1),
    SamplingParams(logit_bias=((3, 1.0),), logprobs=3),
]


def sampler(draws: Sequence[SamplingParams]) -> Sampler:
    return Sampler([SamplingState(sampling, [1, 2, 3], 2) for sampling in draws])


def drawn(
    draws: Sequence[SamplingParams], logits: mx.array, positions: Sequence[int] | None = None
) -> list[int]:
    tokens = sampler(draws)(logits, positions or [3] * len(draws)).tokens
    assert tokens.dtype == mx.uint32
    assert tokens.shape == (len(draws),)
    return list(map(int, np.array(tokens)))


def random_logits(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> mx.array:
    return 3 * mx.random.normal((rows, vocabulary), key=mx.random.key(seed))


@pytest.mark.parametrize("peak", [0.0, 12.0])
def test_draws_from_a_large_vocabulary_follow_the_distribution_into_its_tail(peak: float) -> None:
    rows, calls, bins, vocabulary = 500, 16, 20, 5000
    logits = np.array(random_logits(1, 7, vocabulary), np.float64)[0]
    logits[1234] += peak
    weights = np.exp(logits - logits.max())
    probabilities = weights / weights.sum()
    # Bins over the whole vocabulary: equally many tokens each, rare and frequent ones apart.
    order = np.argsort(logits)
    bin_of = np.empty(vocabulary, np.int64)
    bin_of[order] = np.arange(vocabulary) * bins // vocabulary
    draw_all = sampler([SamplingParams(seed=seed, temperature=1.0) for seed in range(rows)])
    batch = mx.broadcast_to(mx.array(logits.astype(np.float32)), (rows, vocabulary))
    tokens = np.concatenate([np.array(draw_all(batch, [call] * rows).tokens) for call in range(calls)])
    expected = np.bincount(bin_of, probabilities) * rows * calls
    counts = np.bincount(bin_of[tokens], minlength=bins)
    likely = expected > 5
    chi_square = float(np.sum((counts - expected)[likely] ** 2 / expected[likely]))
    assert chi_square < 43.8  # 99.9%, at most 19 degrees of freedom
    assert counts[~likely].sum() <= 5 * (~likely).sum()


def test_seeds_and_positions_draw_independently() -> None:
    """Tests neighbouring keys: all pairs of 60 seeds and 60 positions, on one flat distribution."""
    seeds = positions = range(60)
    pairs = [(seed, position) for seed in seeds for position in positions]
    draws = [SamplingParams(seed=seed, temperature=1.0) for seed, _ in pairs]
    tokens = drawn(draws, mx.zeros((len(pairs), 100)), [position for _, position in pairs])
    chi_square = sum((count - 36) ** 2 / 36 for count in Counter(tokens).values())
    assert chi_square < 149  # 99.9%, 99 degrees of freedom
    found = dict(zip(pairs, tokens, strict=True))
    for shift in ((1, 0), (0, 1), (1, 1), (1, -1)):
        both = [(pair, (pair[0] + shift[0], pair[1] + shift[1])) for pair in pairs]
        same = [found[one] == found[other] for one, other in both if other in found]
        assert abs(sum(same) - len(same) / 100) < 5 * math.sqrt(len(same) / 100)


@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.bfloat16)])
def test_greedy_rows_are_upstreams_argmax_with_other_neighbours_or_without(dtype: mx.Dtype) -> None:
    # Small logits in a narrow type: many round to the same log-probability.
    logits = (0.01 * random_logits(64, vocabulary=4000)).astype(dtype)
    expected = greedy_sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    assert drawn([SamplingParams()] * 64, logits) == expected
    mixed = [SamplingParams() if row % 2 else WAYS[1 + row % 5] for row in range(64)]
    assert drawn(mixed, logits)[1::2] == expected[1::2]


def test_the_narrowest_settings_leave_the_most_likely_token() -> None:
    draws = [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=1e-4),
    ]
    logits = random_logits(len(draws))
    assert drawn(draws, logits) == mx.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_row_without_finite_logits_disturbs_no_other(poison: float) -> None:
    draws = [sampling for way in WAYS for sampling in (way, way)]
    logits = random_logits(len(draws))
    clean = drawn(draws, logits)
    for row in range(0, len(draws), 2):
        sick = mx.array(logits)
        sick[row] = math.copysign(1, poison) * abs(poison)
        tokens = drawn(draws, sick)
        assert 0 <= tokens[row] < VOCABULARY
        assert [t for i, t in enumerate(tokens) if i != row] == [t for i, t in enumerate(clean) if i != row]


def test_large_seeds_count_in_all_their_bits() -> None:
    seeds = [1 << bit for bit in range(63)] + [2**63 - 1, 0]
    draws = [SamplingParams(seed=seed, temperature=1.0) for seed in seeds]
    assert len(set(drawn(draws, mx.zeros((len(seeds), 10_000))))) > len(seeds) - 4
