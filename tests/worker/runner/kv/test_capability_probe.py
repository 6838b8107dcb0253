"""The capability probe at load: what a model's rows can share, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from tests.worker.folders import copied
from worker.interfaces import Model
from worker.load.capabilities import stage_for
from worker.load.load import ModelLoader
from worker.runner.kv.batch import CacheBatch
from worker.runner.kv.capability_probe import BatchCapabilities, ProbeTarget, probe_capabilities
from worker.runner.kv.row_caches import row_cost

SPARSE = "family-minimax_m3_vl"


def capabilities(folder: Path) -> BatchCapabilities:
    """Probe the model in `folder` as the loader does."""
    network, _ = load_model(folder)
    return probe_capabilities(stage_for(folder, network))


@pytest.mark.parametrize(
    ("architecture", "decode", "prefill"),
    [
        ("hybrid", True, True),
        ("jamba", True, False),  # its recurrent layers run over the padding
        ("afm7", False, False),  # derives a position from the width of the keys
        ("llama4", False, False),  # one number for all rows says where its chunks begin
        ("family-gpt_bigcode", False, False),  # looks positions up by one number for all rows
    ],
)
def test_probe_finds_which_passes_rows_can_share(architecture: str, decode: bool, prefill: bool) -> None:
    found = capabilities(model_folder(architecture))
    assert (found.together, found.padded) == (decode, prefill)
    assert found.sparse == (architecture not in ("afm7", "llama4"))
    assert found.restorable
    assert found.cut
    told = [reason.partition(":")[0] for reason in found.reasons]
    assert told == (
        ["cannot be batched"] if not decode else ["prompts cannot be batched"] if not prefill else []
    )


def test_blocks_that_are_cut_where_a_row_lies_are_found(tmp_path: Path) -> None:
    text = json.loads((model_folder(SPARSE) / "config.json").read_text())["text_config"]
    text["sparse_attention_config"] |= {"sparse_block_size": 128, "sparse_topk_blocks": 16}
    folder = copied(tmp_path, SPARSE, text_config=text)
    found = capabilities(folder)
    assert not found.together
    assert found.restorable
    assert "logits change by" in found.reasons[0]
    network, _ = load_model(folder)
    assert probe_capabilities(ProbeTarget(network)).together, "short prompts select all blocks"


@pytest.mark.parametrize(
    ("architecture", "is_right"),
    [
        ("family-glm5_next", True),  # keys, their pooled index and its keys grow together
        ("family-qwen4_exp", False),  # blocks of keys lie elsewhere behind a row's padding
    ],
)
def test_batch_caches_of_upstreams_own_are_used_where_they_are_right(
    architecture: str, is_right: bool
) -> None:
    found = ModelLoader(str(model_folder(architecture))).load(lambda done, total: None)
    assert isinstance(found, Model)
    told = found.engine.capabilities
    assert (told.together, told.padded, told.restorable) == (is_right, is_right, True)
    assert "logits change by" in told.reasons[0] or is_right


def test_answers_that_depend_on_where_a_prompt_is_cut_are_told() -> None:
    found = capabilities(model_folder("family-plamo3"))
    assert found.together
    assert not found.cut
    assert not found.sparse, "sparse prefill runs a prompt in chunks"
    assert "depend on where a prompt is cut" in found.reasons[0]


@pytest.mark.parametrize("architecture", ["hybrid", "sliding", "deepseek_v32"])
def test_a_row_takes_what_was_estimated(architecture: str) -> None:
    network, _ = load_model(model_folder(architecture))
    for tokens in (1, 256, 257, 700):
        caches = make_prompt_cache(network)
        for start in range(0, tokens - 1, 50):
            network(mx.zeros((1, min(50, tokens - 1 - start)), mx.uint32), cache=caches)
        network(mx.zeros((1, 1), mx.uint32), cache=caches)
        batch = CacheBatch(make_prompt_cache(network), is_bucketed=True)
        batch.rearrange([], [caches], [tokens])
        assert row_cost(network)(tokens) == pytest.approx(batch.nbytes, rel=0.02)
