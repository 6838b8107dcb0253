"""The row-count trial finds a network whose results depend on the number of rows, and `--exact` mends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from protocol.types import Exactness, PassCheck
from tests.models.fixtures import model_folder
from worker.interfaces import ModelError
from worker.load import exactness
from worker.load.exactness import (
    CHECKS,
    UNMEASURED,
    exactness_key,
    limit_passes,
    measure,
    measure_model,
)
from worker.runner.kv.capability_probe import BatchCapabilities
from worker.runner.runner import BatchEngine
from worker.values import SamplingParams

ABLE = BatchCapabilities(True, True, True, True, True, True, True, True)
PROMPTS = [tuple((7 * row + 3 * place) % 90 + 1 for place in range(3 + row)) for row in range(8)]
TOKENS = 8


pytestmark = pytest.mark.bfloat16


def stopped() -> float:
    """A clock that stands still: a trial is never cut short on a slow machine."""
    return 0.0


@cache
def _llama() -> Any:
    network = load_model(model_folder("llama"))[0]
    network.set_dtype(mx.bfloat16)  # CPU kernels of this type do not depend on the number of rows
    return network


class RowDependent(nn.Module):
    """A network whose last layer rounds differently, grossly so, in passes of more than `rows` rows or
    `tokens` tokens of a row, as another kernel would."""

    def __init__(self, rows: int, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.network = _llama()
        self.rows = rows
        self.tokens = tokens

    @property
    def layers(self) -> Any:
        return self.network.layers

    def make_cache(self) -> Any:
        return make_prompt_cache(self.network)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self.network(tokens, cache=cache)
        rows, width = tokens.shape
        if rows > self.rows or (self.tokens < width <= 16):
            return logits + 0.5 * mx.roll(logits, 1, axis=-1)
        return logits


def answers(
    engine: BatchEngine, prompts: Sequence[tuple[int, ...]], *, drafts: bool = False
) -> list[list[int]]:
    """Return the tokens of rows that decode together; with `drafts`, half of them drafted."""
    rows = {str(row): prompt for row, prompt in enumerate(prompts)}
    found: dict[str, list[int]] = {row: [] for row in rows}
    engine.prefill({row: prompt[:-1] for row, prompt in rows.items()})
    for row, prompt in rows.items():
        engine.start(row, prompt, len(prompt), SamplingParams())
    while rows:
        step = engine.step({row: [5, 6, 7] for row in rows} if drafts else {})
        for row, token in step.tokens.items():
            found[row] += [token, *(drawn.token for drawn in step.further.get(row, ()))]
        for row in [row for row in rows if len(found[row]) >= TOKENS]:
            engine.drop(row)
            del rows[row]
    return [tokens[:TOKENS] for tokens in found.values()]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    engine = BatchEngine(RowDependent(rows=5, tokens=3), ABLE)
    return [answers(engine, [prompt])[0] for prompt in PROMPTS]


def test_the_trial_finds_a_network_whose_results_depend_on_the_number_of_rows(alone: list[list[int]]) -> None:
    engine = BatchEngine(RowDependent(rows=5, tokens=3), ABLE)
    assert answers(engine, PROMPTS) != alone, "otherwise this network shows nothing"
    found = {(check.kind, check.rows, check.tokens): check for check in measure(engine, clock=stopped).checks}
    assert len(found) == len(CHECKS)
    assert found["decode", 2, 1].is_exact
    assert found["decode", 4, 1].is_exact
    assert not PassCheck(kind="decode", rows=2, difference=1e-6).is_exact  # not even rounding may differ
    for inexact in (("decode", 8, 1), ("decode", 16, 1), ("verify", 1, 4), ("verify", 4, 4)):
        assert found[inexact].differs_at is not None, inexact
        assert found[inexact].difference > 0.01
    assert engine.cache_bytes() == 0


@pytest.mark.parametrize("drafts", [False, True])
def test_exact_keeps_to_the_passes_that_agree(alone: list[list[int]], drafts: bool) -> None:
    network = RowDependent(rows=5, tokens=3)
    engine = BatchEngine(network, ABLE)
    limits = measure(engine, limits=True, clock=stopped)
    assert (limits.rows_max, limits.draft_tokens_max, limits.is_complete) == (5, 3, True)
    engine.limit_passes(5, 3)
    assert answers(engine, PROMPTS, drafts=drafts) == alone


def test_exact_runs_each_row_by_itself_where_no_other_pass_agrees(alone: list[list[int]]) -> None:
    engine = BatchEngine(RowDependent(rows=1, tokens=1), ABLE)
    limits = measure(engine, limits=True, clock=stopped)
    assert (limits.rows_max, limits.draft_tokens_max) == (1, 0)
    engine.limit_passes(1, 0)
    assert not engine.capabilities.together
    assert not engine.capabilities.ahead
    assert answers(engine, PROMPTS, drafts=True) == alone


def test_a_measurement_ends_after_its_time_and_says_so() -> None:
    engine = BatchEngine(RowDependent(rows=99, tokens=99), ABLE)
    now = iter(range(100))
    found = measure(engine, clock=lambda: 120.0 * next(now))
    assert len(found.checks) == 2
    assert not found.is_complete
    late = measure(engine, limits=True, clock=lambda: 1e9 * next(now))
    assert (late.rows_max, late.draft_tokens_max, late.is_complete) == (1, 0, False)


def test_a_measurement_counts_for_its_model_settings_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("llama")

    def key(*settings: str) -> str:
        return exactness_key(folder, folder.glob("*.safetensors"), _llama(), *settings)

    keys = [key(), key("other settings")]
    assert key() == keys[0]
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_passes_are_limited_to_one_row_where_nothing_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    engine = BatchEngine(RowDependent(rows=5, tokens=3), ABLE)
    assert limit_passes("m", engine, None) == UNMEASURED
    assert "was not measured" in caplog.text
    assert not engine.capabilities.together
    found = Exactness(rows_max=5, draft_tokens_max=3)
    engine = BatchEngine(RowDependent(rows=5, tokens=3), ABLE)
    assert limit_passes("m", engine, found) == found
    assert engine.capabilities.together
    assert engine.capabilities.ahead
    assert not engine.capabilities.padded


def test_a_model_that_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(engine: BatchEngine, *, limits: bool) -> None:
        raise ValueError("no such pass")

    network = RowDependent(rows=5, tokens=3)
    monkeypatch.setattr(exactness, "measure", failing)
    with pytest.raises(ModelError, match="which of its passes are exact"):
        measure_model(BatchEngine(network, ABLE), network)


def test_wrong_products_of_a_chip_are_named_with_what_avoids_them() -> None:
    def found(dtype: mx.Dtype, change: Callable[[mx.array], mx.array], bits: int | None = None) -> str:
        def multiply(left: mx.array, weights: exactness.Weights, bits: int | None) -> mx.array:
            return change(exactness.multiply(left, weights, bits))

        return exactness.compare(dtype, bits, multiply, (8, 256, 480))

    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        assert found(dtype, lambda product: product) == ""
    assert found(mx.bfloat16, lambda product: product, bits=4) == ""
    wrong = found(mx.bfloat16, lambda product: mx.roll(product, 1, axis=1))
    assert "bfloat16 matrix products are wrong" in wrong
    assert "MLX_METAL_GPU_ARCH=applegpu_g15" in wrong
    assert "4-bit" in found(mx.float16, lambda product: product * float("nan"), bits=4)
    coarse = found(mx.float32, lambda product: product.astype(mx.bfloat16))
    assert "MLX_ENABLE_TF32=0" in coarse
    assert exactness.wrong_results(mx.bfloat16, None) == []
