"""Which lengths of a config are thresholds, and how they are shortened."""

from __future__ import annotations

from typing import Any

import pytest

from worker.load.capabilities import farthest, shortened


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"text_config": {"sliding_window_size": 128}, "vision_config": {"window_size": 112}}, 128),
        ({"sparse_attention_config": {"sparse_block_size": 128, "sparse_topk_blocks": 16}}, 2048),
        ({"blocksparse_block_size": 64, "blocksparse_num_local_blocks": 16}, 1024),
        ({"rope_scaling": {"original_max_position_embeddings": 4096}, "sliding_window": 512}, 4096),
        ({"text_config": {"indexer_budget": 2048, "indexer_compress_ratio": 4}}, 2048),
        ({"conv_window": 2, "attn_res_block_size": 8, "mamba_chunk_size": 256, "moe_topk": 8}, 0),
    ],
)
def test_thresholds_are_found_by_name_however_deep(config: dict[str, Any], tokens: int) -> None:
    assert farthest(config) == tokens


def test_thresholds_are_brought_near_and_nothing_else_is_touched() -> None:
    config = {
        "hidden_size": 4096,
        "text_config": {"sliding_window": 4096, "layer_types": ["full_attention"]},
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "window_size": 5,
        "vision_config": {"window_size": 112},
    }
    near = next(shortened(config, 8))
    assert near == config | {
        "text_config": {"sliding_window": 8, "layer_types": ["full_attention"]},
        "sparse_block_size": 4,
        "sparse_topk_blocks": 2,
    }
    assert farthest(near) == 8


def test_shortened_thresholds_are_relaxed_step_by_step() -> None:
    config = {"blocksparse_block_size": 64, "blocksparse_num_local_blocks": 16}
    config |= {"original_max_position_embeddings": 4096, "sliding_window": 512}
    assert [farthest(near) for near in shortened(config, 8)] == [8, 64, 4096]
