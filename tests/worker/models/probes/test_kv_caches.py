"""Models whose KV caches upstream cannot cap or quantize are refused at their start, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.worker_settings import WorkerSettings
from tests.models.fixtures import model_folder
from tests.worker.folders import failure, nothing
from worker.contract.engine import Model, ModelError
from worker.contract.kv_cap import KVCap
from worker.contract.kv_quantization import KVQuantization
from worker.models.load import ModelLoader
from worker.transport.ready import policy_of, ready_of

CAP = KVCap(64)
KV = KVQuantization(8, 32)


@pytest.mark.parametrize("name", ["hybrid", "sliding"])
def test_models_with_caches_of_their_own_are_not_capped(name: str) -> None:
    why = "the model chooses the caches of its layers itself, and mlx-lm ignores max_kv_size for it"
    asked = f"{name}: --max-kv-size 64: its KV caches cannot be capped"
    assert failure(model_folder(name), kv_cap=CAP) == f"{asked}: {why}."


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


@pytest.mark.parametrize(
    ("option", "fields"), [("--max-kv-size", {"kv_cap": CAP}), ("--kv-bits", {"kv_quantization": KV})]
)
def test_images_exact_passes_and_models_without_text_are_refused(option: str, fields: dict[str, Any]) -> None:
    dense = model_folder("dense")
    assert f"it has no KV caches: leave {option} out" in failure(dense, task="embed", **fields)
    with pytest.raises(ModelError, match=f"{option} is for text only: leave it out, or add --text-only"):
        ModelLoader(None, **fields).load(nothing)
    with pytest.raises(ModelError, match=f"--exact cannot be combined with {option}"):
        ModelLoader(str(dense), measurement="exact", **fields).load(nothing)
    if option == "--max-kv-size":
        with pytest.raises(ModelError, match="--max-kv-size cannot be combined with --kv-bits"):
            ModelLoader(str(dense), kv_quantization=KVQuantization(8), **fields).load(nothing)
    else:
        model = ModelLoader(str(model_folder("qwen3_5-eyes")), text_only=True, **fields).load(nothing)
        assert model.info.kv_quantization == KV


CAPS = [{"kv_cap": cap} for cap in (None, CAP, KVCap(65))]
QUANTIZED = [{"kv_quantization": kv} for kv in (None, KV, KVQuantization(4, 32), KVQuantization(8, 32, 0))]


# The cap's size and the start of quantization are of no account to a probe.
@pytest.mark.parametrize(("settings", "probes"), [(CAPS, 2), (QUANTIZED, 3)], ids=["cap", "quantization"])
def test_settings_change_what_is_reused(tmp_path: Path, settings: list[dict[str, Any]], probes: int) -> None:
    folder = str(model_folder("dense"))
    found = [ModelLoader(folder, probe_cache_folder=tmp_path, **kv).load(nothing) for kv in settings]
    assert len({model.info.fingerprint for model in found}) == len(settings)
    assert len({model.info.identity for model in found}) == len(settings)
    assert len(list(tmp_path.iterdir())) == probes


def test_the_context_is_what_rows_of_such_caches_fit() -> None:
    def told(tokens: int, **fields: Any) -> tuple[int, int | None, bool]:
        model = ModelLoader(str(model_folder("dense")), **fields).load(nothing)
        assert isinstance(model, Model)
        settings = WorkerSettings(cache_limit_bytes=model.engine.row_bytes(tokens))
        ready = ready_of("w", model.info, policy_of(settings, model))
        return ready.context_length, ready.max_kv_size, ready.kv_quantization is not None

    assert told(512) == (511, None, False)
    assert told(512, kv_cap=KVCap(500)) == (4096, 500, False)
    assert told(512, kv_cap=KVCap(700)) == (511, 700, False)
    assert told(1024, kv_quantization=KVQuantization(8, 64, 0, 512)) == (3583, None, True)
    assert told(1024, kv_quantization=KVQuantization(8, 64, 5000)) == (1023, None, True)
