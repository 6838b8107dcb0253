"""Building blocks of the zoo's configs."""

from __future__ import annotations

from typing import Any

from tests.models.configs import VOCABULARY, Config

WINDOW = 16
"""Window of the sliding layers in tokens, including the current one."""

ANY: Config = {
    "attention_bias": False, "dtype": "float32", "head_dim": 32, "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 128, "max_position_embeddings": 4096, "mlp_bias": False, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "vocab_size": VOCABULARY,
}  # fmt: skip

ROUTED: Config = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 64, "n_group": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "topk_group": 1,
}  # fmt: skip

LATENT: Config = {
    "kv_lora_rank": 32, "num_key_value_heads": 4, "q_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip

EXPERTS: Config = {
    "decoder_sparse_step": 1, "mlp_only_layers": [0], "moe_intermediate_size": 64, "norm_topk_prob": True,
    "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def of(architecture: str, *parts: Config, **values: Any) -> Config:
    config = ANY | {"model_type": architecture}
    for part in (*parts, values):
        config |= part
    return config
