"""Top-p, top-k and min-p against upstream's own functions and against sorting."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from worker.runner.sampling.distribution import LEADING_MAX, leading, nucleus
from worker.runner.sampling.sampler import Sampler
from worker.runner.sampling.state import SamplingState
from worker.values import SamplingParams

VOCABULARY = 420
ROWS = 500
FILTERS = [
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=12),
    SamplingParams(min_p=0.2),
    SamplingParams(top_p=0.95, top_k=40, min_p=0.05),
    SamplingParams(top_p=0.01),
    SamplingParams(),
    SamplingParams(top_k=LEADING_MAX),
    SamplingParams(top_k=LEADING_MAX + 1),
    SamplingParams(top_k=400, top_p=0.999),
    SamplingParams(top_k=VOCABULARY),
]


def upstream_logprobs(logits: mx.array, sampling: SamplingParams) -> mx.array:
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if sampling.top_p < 1:
        logprobs = apply_top_p(logprobs, sampling.top_p)
    if sampling.min_p:
        logprobs = apply_min_p(logprobs, sampling.min_p)
    if 0 < sampling.top_k < logits.shape[-1]:
        logprobs = apply_top_k(logprobs, sampling.top_k)
    return logprobs


def drawn_tokens(logits: mx.array, temperature: float, calls: int) -> list[list[int]]:
    """Return for each filter the tokens of `ROWS` rows in each of `calls` calls, all filters in one batch."""
    draws = [replace(each, seed=seed, temperature=temperature) for each in FILTERS for seed in range(ROWS)]
    sampler = Sampler([SamplingState(sampling, [0], 1) for sampling in draws])
    batch = mx.broadcast_to(logits, (len(draws), VOCABULARY))
    tokens = [np.array(sampler(batch, [1 + call] * len(draws)).tokens) for call in range(calls)]
    result: list[list[int]] = np.stack(tokens, axis=-1).reshape(len(FILTERS), -1).tolist()
    return result


def test_rows_draw_every_token_that_upstream_keeps_and_no_other() -> None:
    # At this temperature the remaining tokens are almost equally likely: every one of them is drawn.
    logits = 3 * mx.random.normal((1, VOCABULARY), key=mx.random.key(0))
    for sampling, tokens in zip(FILTERS, drawn_tokens(logits, 1e4, 9), strict=True):
        kept = np.flatnonzero(np.array(upstream_logprobs(logits, sampling))[0] > -np.inf)
        assert sorted(set(tokens)) == kept.tolist(), sampling


def test_filtered_tokens_are_sampled_at_the_temperature() -> None:
    calls, temperature = 8, 0.6
    logits = mx.random.normal((1, VOCABULARY), key=mx.random.key(5))
    for sampling, tokens in zip(FILTERS, drawn_tokens(logits, temperature, calls), strict=True):
        expected = ROWS * calls * np.array(mx.softmax(upstream_logprobs(logits, sampling) / temperature))[0]
        counts = Counter(tokens)
        often = [token for token in range(VOCABULARY) if expected[token] > 5]
        chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in often)
        assert chi_square < len(often) + 4 * (2 * len(often)) ** 0.5 + 6, sampling


Shape = tuple[int, int, int, float, bool]
rows_of_logits = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3000), st.floats(0.0, 12.0), st.booleans()
)


def made(seed: int, rows: int, vocabulary: int, spread: float, is_coarse: bool) -> np.ndarray:
    logits = spread * np.random.default_rng(seed).standard_normal((rows, vocabulary))
    return (np.round(logits) if is_coarse else logits).astype(np.float32)  # coarse: many equal values


@settings(max_examples=25, deadline=None)
@given(rows_of_logits, st.integers(1, 300))
def test_the_leading_tokens_are_the_first_of_a_sort_and_equals_stand_by_id(shape: Shape, count: int) -> None:
    logits = made(*shape)
    tokens, values = leading(mx.array(logits), count)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(np.array(tokens), expected)
    assert np.array_equal(np.array(values), np.take_along_axis(logits, expected, axis=-1))


@settings(max_examples=25, deadline=None)
@given(rows_of_logits, st.floats(0.0, 1.0, exclude_max=True))
def test_the_nucleus_is_the_fewest_likeliest_tokens_with_enough_mass(shape: Shape, top_p: float) -> None:
    logits = made(*shape)
    kept = np.array(nucleus(mx.array(logits), mx.array([[top_p]] * len(logits))))
    for row, is_kept in zip(logits.astype(np.float64), kept, strict=True):
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        assert is_kept.any()
        # Differences below the rounding of an exponential, or of a fixed-point mass, count as equal.
        bar = probabilities[is_kept].min() * (1 + 1e-5) + 2e-9
        assert not (probabilities[~is_kept] > bar).any()
        assert probabilities[is_kept].sum() >= top_p - 1e-5
        assert probabilities[probabilities > bar].sum() <= top_p + 1e-5


def test_a_row_without_filters_keeps_its_whole_tail_beside_one_with() -> None:
    # A sharp peak: the mass above the tail rounds to exactly 1.
    logits = mx.concatenate([mx.array([[60.0]]), mx.zeros((1, VOCABULARY - 1))], axis=1)
    rows = 4000
    draws = [SamplingParams(seed=row, temperature=1e4, top_p=0.5 if row % 2 else 1.0) for row in range(rows)]
    sampler = Sampler([SamplingState(sampling, [0], 1) for sampling in draws])
    tokens: Any = sampler(mx.broadcast_to(logits, (rows, VOCABULARY)), [1] * rows).tokens.tolist()
    assert len(set(tokens[::2])) > 0.95 * VOCABULARY
    assert set(tokens[1::2]) == {0}
