"""Models whose KV caches upstream cannot quantize are refused at their start, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.settings.worker import WorkerSettings
from tests.models.fixtures import model_folder
from tests.worker.folders import failure, nothing
from worker.gateway.model_thread import policy_of, ready_of
from worker.interfaces import Model, ModelError
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
from worker.values import KVQuantization

KV = KVQuantization(8, 32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sliding", "mlx-lm cannot quantize those of its sliding-window layers"),
        ("mamba2", "none of its layers has a KV cache that mlx-lm can quantize"),
    ],
)
def test_layers_that_upstream_does_not_quantize_are_refused(name: str, reason: str) -> None:
    asked = "--kv-bits 8 with --kv-group-size 32"
    message = failure(model_folder(name), kv_quantization=KV)
    assert message == f"{name}: {asked}: its KV caches cannot be quantized: {reason}."
    message = failure(model_folder("dense"), kv_quantization=KVQuantization(4, 128))
    assert "--kv-bits 4 with --kv-group-size 128" in message
    assert "needs to be divisible by the quantization group size 128" in message


def test_images_exact_passes_and_models_without_text_are_refused() -> None:
    dense = model_folder("dense")
    assert "it has no KV caches: leave --kv-bits out" in failure(dense, task="embed", kv_quantization=KV)
    with pytest.raises(ModelError, match="--kv-bits is for text only: leave it out, or add --text-only"):
        ModelLoader(None, LoadOptions(kv_quantization=KV)).load(nothing)
    with pytest.raises(ModelError, match="--exact cannot be combined with --kv-bits"):
        ModelLoader(str(dense), LoadOptions(exactness="limits", kv_quantization=KV)).load(nothing)
    model = ModelLoader(
        str(model_folder("qwen3_5-eyes")), LoadOptions(text_only=True, kv_quantization=KV)
    ).load(nothing)
    assert model.info.kv_quantization == KV


QUANTIZED = [None, KV, KVQuantization(4, 32), KVQuantization(8, 64)]


def test_settings_change_what_is_reused(tmp_path: Path) -> None:
    folder = str(model_folder("dense"))
    found = [
        ModelLoader(folder, LoadOptions(probe_folder=tmp_path, kv_quantization=kv)).load(nothing)
        for kv in QUANTIZED
    ]
    assert len({model.info.fingerprint for model in found}) == len(QUANTIZED)
    assert len({model.info.identity for model in found}) == len(QUANTIZED)
    assert len(list(tmp_path.iterdir())) == len(QUANTIZED) - 1, "the table knows the model without"


def test_the_context_is_what_rows_of_such_caches_fit() -> None:
    def told(tokens: int, **fields: Any) -> tuple[int, bool]:
        model = ModelLoader(str(model_folder("dense")), LoadOptions(**fields)).load(nothing)
        assert isinstance(model, Model)
        settings = WorkerSettings(cache_limit_bytes=model.engine.row_bytes(tokens))
        ready = ready_of("w", model.info, policy_of(settings, model))
        return ready.context_length, ready.kv_quantization is not None

    assert told(496) == (447, False)
    assert told(496, kv_quantization=KVQuantization(8)) == (447, True)
