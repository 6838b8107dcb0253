"""Chunked gated delta layers against mlx-lm's own loop over the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta as upstream
from mlx_lm.models.cache import make_prompt_cache

from tests.worker.probed_networks import network, prompt_of
from worker.load import gated_delta, memory
from worker.load.device import prepare_device
from worker.runner.kv.capability_probe import differences

ERROR_MAX = 2e-6
"""Largest error of outputs and states, relative to their norm."""
LOGITS_ERROR_MAX = 1e-4
"""Largest error of the logits at any position of a prompt, relative to their spread."""
ROWS, KEY_HEADS, HEADS, WIDTH = 2, 2, 4, 32
BY_TOKEN = gated_delta._by_token


def made(tokens: int, decay: float) -> list[mx.array]:
    """Return q, k, v, g, beta and a state. `decay`: scale of the decay's logarithm."""
    keys = iter(mx.random.split(mx.random.key(tokens), 6))
    q, k = (mx.random.normal((ROWS, tokens, KEY_HEADS, WIDTH), key=next(keys)) for _ in range(2))
    q, k = upstream.normalize_qk(q, k, inv_scale=WIDTH**-0.5, eps=1e-6)
    v = mx.random.normal((ROWS, tokens, HEADS, WIDTH), key=next(keys))
    g = mx.exp(-decay * mx.abs(mx.random.normal((ROWS, tokens, HEADS), key=next(keys))))
    beta = 2 * mx.sigmoid(mx.random.normal((ROWS, tokens, HEADS), key=next(keys)))
    return [q, k, v, g, beta, mx.random.normal((ROWS, HEADS, WIDTH, WIDTH), key=next(keys))]


def error(found: mx.array, right: mx.array) -> float:
    return float(mx.linalg.norm(found - right) / mx.linalg.norm(right))


@pytest.mark.parametrize("tokens", [15, 16, 17, 100])
@pytest.mark.parametrize("decay", [0.01, 1.0, 200.0])
def test_chunks_give_what_the_loop_gives(tokens: int, decay: float) -> None:
    """Also behind a state, beside padding, and where a decay is 0 in float32."""
    *given, state = made(tokens, decay)
    mask = mx.arange(tokens) < mx.array([[tokens], [tokens - 5]])
    for last in ((None, None), (state, None), (state, mask)):
        found, after = gated_delta.chunked(*given, *last)
        right, right_after = BY_TOKEN(*given, *last)
        assert error(found * mask[..., None, None], right * mask[..., None, None]) <= ERROR_MAX
        assert error(after, right_after) <= ERROR_MAX


def test_a_prompt_in_chunks_of_any_length_has_upstreams_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt_of(1, 150)

    def logits(form: Callable[..., Any], size: int) -> mx.array:
        monkeypatch.setattr(upstream, "gated_delta_ops", form)
        caches = make_prompt_cache(network("hybrid"))
        parts = [tokens[first : first + size] for first in range(0, len(tokens), size)]
        return mx.concatenate([network("hybrid")(mx.array([part]), cache=caches)[0] for part in parts])

    right = logits(BY_TOKEN, len(tokens))
    for size in (150, 64, 37, 16, 5):
        assert float(mx.max(differences(logits(gated_delta.chunked, size), right))) <= LOGITS_ERROR_MAX


@pytest.mark.parametrize(("has_metal", "is_exact"), [(False, False), (False, True), (True, False)])
def test_metal_keeps_its_kernel_and_exact_models_their_loop(
    has_metal: bool, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "gated_delta_ops", BY_TOKEN)
    monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
    monkeypatch.setattr(memory, "apply", lambda budget: None)
    prepare_device(memory.MemoryBudget(2**30, 0.1), is_exact=is_exact)
    is_chunked = upstream.gated_delta_ops is gated_delta.chunked
    assert is_chunked == (not has_metal and not is_exact)
