"""Models whose KV caches cannot be quantized are refused at their start, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.worker_settings import WorkerSettings
from tests.models.fixtures import model_folder
from tests.worker.folders import failure, nothing
from worker.contract.engine import Model, ModelError
from worker.contract.kv_quantization import KVQuantization
from worker.models.load import ModelLoader
from worker.transport.ready import policy_of, ready_of

KV = KVQuantization(8, 32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sliding", "mlx-lm cannot quantize those of its sliding-window layers"),
        ("mamba2", "none of its layers has a KV cache that mlx-lm can quantize"),
    ],
)
def test_layers_that_upstream_does_not_quantize_are_refused(name: str, reason: str) -> None:
    message = failure(model_folder(name), kv_quantization=KV)
    asked = "--kv-bits 8 with --kv-group-size 32"
    assert message == f"{name}: {asked}: its KV caches cannot be quantized: {reason}."


def test_heads_that_are_no_multiple_of_the_group_are_refused() -> None:
    message = failure(model_folder("dense"), kv_quantization=KVQuantization(4, 128))
    assert "--kv-bits 4 with --kv-group-size 128" in message
    assert "needs to be divisible by the quantization group size 128" in message


def test_images_are_refused_and_so_are_models_that_generate_nothing() -> None:
    dense = model_folder("dense")
    assert "it has no KV caches: leave --kv-bits out" in failure(dense, kv_quantization=KV, task="embed")
    with pytest.raises(ModelError, match="--kv-bits is for text only: leave it out, or add --text-only"):
        ModelLoader(None, kv_quantization=KV).load(nothing)
    with pytest.raises(ModelError, match="--exact cannot be combined with --kv-bits"):
        ModelLoader(str(dense), kv_quantization=KV, measurement="exact").load(nothing)
    model = ModelLoader(None, kv_quantization=KV, text_only=True).load(nothing)
    assert model.info.kv_quantization == KV


def test_settings_change_what_may_be_reused_and_continued(tmp_path: Path) -> None:
    settings = (None, KV, KVQuantization(4, 32), KVQuantization(8, 32, 0))
    found = []
    for kv in settings:
        loader = ModelLoader(str(model_folder("dense")), kv_quantization=kv, probe_cache_folder=tmp_path)
        found.append(loader.load(nothing))
    assert len({model.info.fingerprint for model in found}) == len(settings)
    assert len({model.info.identity for model in found}) == len(settings)
    assert len(list(tmp_path.iterdir())) == 3  # the start is of no account


def test_the_context_is_that_of_quantized_caches() -> None:
    def context(kv: KVQuantization | None) -> int:
        model = ModelLoader(str(model_folder("dense")), kv_quantization=kv).load(nothing)
        assert isinstance(model, Model)
        settings = WorkerSettings(cache_limit_bytes=model.engine.row_bytes(1024))
        told = ready_of("w", model.info, policy_of(settings, model))
        assert (told.kv_quantization is None) == (kv is None)
        return told.context_length

    assert context(None) == 1023
    assert context(KVQuantization(8, 64, 0, 512)) == 3583
    assert context(KVQuantization(8, 64, 5000)) == 1023
