"""What a model's rows can share, and what they will take, found before the first request."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from worker.engine.caches.cost import row_cost
from worker.engine.caches.trial import can_decode_together, can_prefill_together


@pytest.mark.parametrize(
    ("architecture", "decode", "prefill"),
    [
        ("dense", True, True),
        ("hybrid", True, True),
        ("gpt_oss", True, True),
        ("jamba", True, False),  # its recurrent layers run over the padding
        ("afm7", False, False),  # takes a position from the width of the keys
        ("llama4", False, False),  # its chunks begin where one number says, for all rows
        ("recurrent_gemma", False, False),  # its first token is not as the others
    ],
)
def test_what_rows_can_share_is_found_by_trying(architecture: str, decode: bool, prefill: bool) -> None:
    network, _ = load_model(model_folder(architecture))
    assert can_decode_together(network) == decode
    assert can_prefill_together(network) == prefill


@pytest.mark.parametrize("tokens", [1, 100, 256, 257, 700])
@pytest.mark.parametrize(
    "architecture", ["dense", "hybrid", "sliding", "llama_4bit", "mamba2", "deepseek_v32"]
)
def test_a_row_takes_what_was_estimated(architecture: str, tokens: int) -> None:
    network, _ = load_model(model_folder(architecture))
    caches = make_prompt_cache(network)
    for start in range(0, tokens - 1, 50):
        network(mx.zeros((1, min(50, tokens - 1 - start)), mx.uint32), cache=caches)
    network(mx.zeros((1, 1), mx.uint32), cache=caches)
    taken = sum(cache.nbytes for cache in caches)
    assert row_cost(network)(tokens) == pytest.approx(taken, rel=0.25)
