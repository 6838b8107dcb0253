"""Models whose KV caches upstream does not cap are refused at their start, in one sentence."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
import pytest

from protocol.worker_settings import WorkerSettings
from tests.models.fixtures import model_folder
from tests.worker.folders import failure, nothing
from worker.contract.engine import Model, ModelError
from worker.contract.kv_cap import KVCap
from worker.contract.kv_quantization import KVQuantization
from worker.models.load import ModelLoader
from worker.models.probes import kv_cap
from worker.transport.ready import policy_of, ready_of

CAP = KVCap(64)


@pytest.mark.parametrize("name", ["hybrid", "sliding"])
def test_models_with_caches_of_their_own_are_refused(name: str) -> None:
    why = "the model chooses the caches of its layers itself, and mlx-lm ignores max_kv_size for it"
    asked = f"{name}: --max-kv-size 64: its KV caches cannot be capped"
    assert failure(model_folder(name), kv_cap=CAP) == f"{asked}: {why}."


def test_other_forms_of_caches_are_refused() -> None:
    dense = model_folder("dense")
    assert "it has no KV caches: leave --max-kv-size out" in failure(dense, kv_cap=CAP, task="embed")
    with pytest.raises(ModelError, match="--max-kv-size is for text only: leave it out, or add --text-only"):
        ModelLoader(None, kv_cap=CAP).load(nothing)
    with pytest.raises(ModelError, match="--exact cannot be combined with --max-kv-size"):
        ModelLoader(str(dense), kv_cap=CAP, measurement="exact").load(nothing)
    with pytest.raises(ModelError, match="--max-kv-size cannot be combined with --kv-bits"):
        ModelLoader(str(dense), kv_cap=CAP, kv_quantization=KVQuantization(8)).load(nothing)


def test_a_model_with_other_masks_than_upstreams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would be that makes its masks itself."""

    def seen(self: object, asking: object, columns: object) -> None:
        raise ValueError("masks have another shape")

    monkeypatch.setattr("worker.engine.caches.capped.CappedKVCache._visible", seen)
    model = ModelLoader(str(model_folder("dense"))).load(nothing)
    network: nn.Module = model.engine._model  # type: ignore[attr-defined,union-attr]
    with pytest.raises(ModelError, match="cannot be capped: masks have another shape"):
        kv_cap.require_cappable(network, CAP, "dense")


def test_caps_change_what_may_be_reused_and_continued(tmp_path: Path) -> None:
    settings = (None, CAP, KVCap(65))
    loaders = [
        ModelLoader(str(model_folder("dense")), kv_cap=cap, probe_cache_folder=tmp_path) for cap in settings
    ]
    found = [loader.load(nothing) for loader in loaders]
    assert len({model.info.fingerprint for model in found}) == len(settings)
    assert len({model.info.identity for model in found}) == len(settings)
    assert len(list(tmp_path.iterdir())) == 2  # the cap's size is of no account


def test_the_context_is_the_models_if_a_capped_row_fits() -> None:
    def told(cap: KVCap | None) -> tuple[int, int | None]:
        model = ModelLoader(str(model_folder("dense")), kv_cap=cap).load(nothing)
        assert isinstance(model, Model)
        settings = WorkerSettings(cache_limit_bytes=model.engine.row_bytes(512))
        ready = ready_of("w", model.info, policy_of(settings, model))
        return ready.context_length, ready.max_kv_size

    assert told(None) == (511, None)
    assert told(KVCap(500)) == (4096, 500)
    assert told(KVCap(700)) == (511, 700)
