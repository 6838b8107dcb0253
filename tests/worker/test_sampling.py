"""The sampler against upstream's own functions, and against statistics."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler

from worker.contract import Draw
from worker.sampling import Sampler

VOCABULARY = 300
FILTERS = [
    Draw(temperature=0.7, top_p=0.9),
    Draw(temperature=1.3, top_p=0.4, top_k=7),
    Draw(temperature=1.0, top_k=12),
    Draw(temperature=1.0, min_p=0.2),
    Draw(temperature=1.0, top_p=0.95, top_k=40, min_p=0.05),
    Draw(temperature=1.0, top_p=0.01),
    Draw(temperature=1.0),
    Draw(temperature=1.0, top_k=VOCABULARY),
]


def random_logits(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> mx.array:
    return 3 * mx.random.normal((rows, vocabulary), key=mx.random.key(seed))


def kept(logprobs: mx.array) -> list[list[bool]]:
    result: list[list[bool]] = (logprobs > -mx.inf).tolist()
    return result


def upstream_filtered(logits: mx.array, draw: Draw) -> mx.array:
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if draw.top_p < 1:
        logprobs = apply_top_p(logprobs, draw.top_p)
    if draw.min_p:
        logprobs = apply_min_p(logprobs, draw.min_p)
    if 0 < draw.top_k < logits.shape[-1]:
        logprobs = apply_top_k(logprobs, draw.top_k)
    return logprobs


@pytest.mark.parametrize("seed", range(5))
def test_each_row_keeps_the_tokens_upstream_keeps_whatever_its_neighbours_ask_for(seed: int) -> None:
    logits = random_logits(len(FILTERS), seed)
    together = kept(Sampler(FILTERS).filtered(logits))
    for row, draw in enumerate(FILTERS):
        alone = logits[row : row + 1]
        assert together[row] == kept(upstream_filtered(alone, draw))[0], draw
        assert together[row] == kept(Sampler([draw]).filtered(alone))[0], draw


def test_rows_that_all_ask_for_top_k_are_cut_without_sorting_everything() -> None:
    draws = [Draw(temperature=1.0, top_k=3, top_p=0.99), Draw(temperature=1.0, top_k=50, top_p=0.6)]
    logits = random_logits(2)
    together = kept(Sampler(draws).filtered(logits))
    for row, draw in enumerate(draws):
        assert together[row] == kept(upstream_filtered(logits[row : row + 1], draw))[0]


def test_a_row_without_filters_keeps_its_whole_tail() -> None:
    # A sharp peak: the mass above the tail rounds to exactly 1.
    logits = mx.concatenate([mx.array([[60.0]]), mx.zeros((1, VOCABULARY - 1))], axis=1)
    both = mx.concatenate([logits, logits])
    for neighbour in (Draw(temperature=1.0, top_p=0.5), Draw(temperature=1.0, top_k=2)):
        rows = kept(Sampler([Draw(temperature=1.0), neighbour]).filtered(both))
        assert sum(rows[0]) == VOCABULARY
        assert sum(rows[1]) == 1 if neighbour.top_p < 1 else rows[1][0]


def test_draws_follow_the_distribution() -> None:
    logits = mx.array([2.0, 1.0, 0.0, -0.5, 1.5, -2.0, 0.3, 0.3])
    temperature, rows = 0.7, 20_000
    draw = Draw(seed=11, temperature=temperature)
    tokens = Sampler([draw] * rows)(mx.broadcast_to(logits, (rows, 8)), range(rows)).tolist()
    expected = (mx.softmax(logits / temperature) * rows).tolist()
    counts = Counter(tokens)
    chi_square = sum((counts[token] - mean) ** 2 / mean for token, mean in enumerate(expected))
    assert chi_square < 24.3  # 99.9% of honest samplers, 7 degrees of freedom


def test_seeds_and_positions_draw_independently() -> None:
    """Neighbouring keys: all pairs of 60 seeds and 60 positions, on one flat distribution."""
    seeds = positions = range(60)
    pairs = [(seed, position) for seed in seeds for position in positions]
    flat = mx.zeros((len(pairs), 100))
    draws = [Draw(seed=seed, temperature=1.0) for seed, _ in pairs]
    tokens = Sampler(draws)(flat, [position for _, position in pairs]).tolist()
    chi_square = sum((count - 36) ** 2 / 36 for count in Counter(tokens).values())
    assert chi_square < 149  # 99.9%, 99 degrees of freedom
    drawn = dict(zip(pairs, tokens, strict=True))
    for shift in ((1, 0), (0, 1), (1, 1), (1, -1)):
        both = [(pair, (pair[0] + shift[0], pair[1] + shift[1])) for pair in pairs]
        same = [drawn[one] == drawn[other] for one, other in both if other in drawn]
        assert abs(sum(same) - len(same) / 100) < 5 * math.sqrt(len(same) / 100)


def test_large_seeds_count_in_all_their_bits() -> None:
    seeds = [1 << bit for bit in range(63)] + [2**63 - 1, 0]
    flat = mx.zeros((len(seeds), 10_000))
    tokens = Sampler([Draw(seed=seed, temperature=1.0) for seed in seeds])(flat, [5] * len(seeds)).tolist()
    assert len(set(tokens)) > len(seeds) - 4


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    draws = [Draw(seed=seed, temperature=1.0, top_p=0.9 if seed % 2 else 1.0) for seed in range(6)]
    draws[3] = Draw()
    logits = random_logits(6)
    positions = [3, 17, 4096, 9, 0, 2**20]
    together = Sampler(draws)(logits, positions).tolist()
    again = Sampler(draws)(logits, positions).tolist()
    backwards = Sampler(draws[::-1])(logits[::-1], positions[::-1]).tolist()
    alone = [Sampler([draws[i]])(logits[i : i + 1], [positions[i]]).item() for i in range(6)]
    assert together == again == backwards[::-1] == alone
    assert all(0 <= token < VOCABULARY for token in together)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_greedy_rows_are_upstreams_argmax_with_sampled_neighbours_or_without(dtype: mx.Dtype) -> None:
    # Small logits in a narrow type: many round to the same log-probability.
    logits = (0.01 * random_logits(64, vocabulary=4000)).astype(dtype)
    expected = greedy_sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    assert Sampler([Draw()] * 64)(logits, [1] * 64).tolist() == expected
    mixed = [Draw() if row % 2 else Draw(seed=row, temperature=1.0) for row in range(64)]
    assert Sampler(mixed)(logits, [1] * 64).tolist()[1::2] == expected[1::2]


@pytest.mark.parametrize(
    "draw",
    [
        Draw(temperature=1.0, top_k=1),
        Draw(temperature=1.0, top_p=0.0),
        Draw(temperature=1.0, min_p=1.0),
        Draw(temperature=1e-9),
        Draw(temperature=1e-4),
    ],
)
def test_the_narrowest_settings_leave_the_most_likely_token(draw: Draw) -> None:
    logits = random_logits(4)
    assert Sampler([draw] * 4)(logits, range(4)).tolist() == mx.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_without_finite_logits_disturbs_no_other(poison: float) -> None:
    draws = [
        Draw(seed=1, temperature=1.0, top_p=0.9, top_k=20, min_p=0.01),
        Draw(seed=2, temperature=1.0, top_p=0.9, top_k=20, min_p=0.01),
        Draw(),
    ]
    logits = random_logits(3)
    clean = Sampler(draws)(logits, [1, 2, 3]).tolist()
    for row in range(3):
        sick = mx.array(logits)
        sick[row] = poison
        tokens = Sampler(draws)(sick, [1, 2, 3]).tolist()
        assert 0 <= tokens[row] < VOCABULARY
        assert [t for i, t in enumerate(tokens) if i != row] == [t for i, t in enumerate(clean) if i != row]


def test_tokens_are_unsigned_and_one_per_row() -> None:
    for draws in ([Draw()] * 2, [Draw(temperature=1.0)] * 2, [Draw(), Draw(temperature=1.0)]):
        tokens = Sampler(draws)(random_logits(2), [0, 0])
        assert tokens.shape == (2,)
        assert tokens.dtype == mx.uint32
