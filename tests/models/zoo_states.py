"""Configs of models with recurrent states of fixed size, alone or beside attention."""

from __future__ import annotations

from tests.models.configs import Config
from tests.models.zoo_parts import EXPERTS, LATENT, ROUTED, WINDOW, of

_GATED_DELTA: Config = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_value_head_dim": 32,
}  # fmt: skip

_MAMBA: Config = {
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_state": 32,
    "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_proj_bias": False,
}  # fmt: skip


def _kimi_linear() -> Config:
    return {
        "linear_attn_config": {
            "full_attn_layers": [2], "head_dim": 32, "kda_layers": [1, 3], "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1, "model_max_length": 4096, "moe_intermediate_size": 64, "num_experts": 4,
        "num_experts_per_token": 2, "num_hidden_layers": 3, "num_shared_experts": 1,
    }  # fmt: skip


def _jamba() -> Config:
    return of(
        "jamba", attn_layer_offset=1, attn_layer_period=3, expert_layer_offset=1, expert_layer_period=2,
        mamba_d_conv=4, mamba_d_state=8, mamba_expand=2, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=3,
    )  # fmt: skip


def _granite() -> Config:
    return of(
        "granitemoehybrid", _MAMBA, attention_multiplier=0.2, embedding_multiplier=1.0,
        layer_types=["mamba", "attention", "mamba"], logits_scaling=1.0, num_experts_per_tok=2,
        num_hidden_layers=3, num_local_experts=4, position_embedding_type="nope", residual_multiplier=1.0,
        shared_intermediate_size=64,
    )  # fmt: skip


def _nemotron() -> Config:
    return of(
        "nemotron_h", ROUTED, conv_kernel=4, hybrid_override_pattern=["M", "*", "-", "M", "E"],
        layer_norm_epsilon=1e-6, mamba_head_dim=32, mamba_num_heads=4, mamba_proj_bias=False,
        moe_shared_expert_intermediate_size=64, n_groups=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        ssm_state_size=32, use_bias=False, use_conv_bias=True,
    )  # fmt: skip


STATES: dict[str, Config] = {
    "mamba": of("mamba", conv_kernel=4, state_size=8, time_step_rank=4, use_bias=False, use_conv_bias=True),
    "mamba2": of(
        "mamba2", conv_kernel=4, layer_norm_epsilon=1e-6, n_groups=1, num_heads=4, state_size=32,
        time_step_limit=[0.0, 100.0], time_step_rank=4, use_bias=False, use_conv_bias=True,
    ),
    "rwkv7": of(
        "rwkv7", a_low_rank_dim=16, decay_low_rank_dim=16, gate_low_rank_dim=16, norm_eps=1e-5,
        v_low_rank_dim=16,
    ),
}  # fmt: skip

MIXED: dict[str, Config] = {
    "qwen3_next": of("qwen3_next", _GATED_DELTA, EXPERTS, num_hidden_layers=4, partial_rotary_factor=0.5),
    "kimi_linear": of("kimi_linear", LATENT, _kimi_linear()),
    "falcon_h1": of(
        "falcon_h1", _MAMBA, attention_out_multiplier=1.0, lm_head_multiplier=1.0, mamba_d_ssm=128
    ),
    "jamba": _jamba(),
    "granitemoehybrid": _granite(),
    "nemotron_h": _nemotron(),
    "plamo2": of(
        "plamo2", full_attention_idx=[1], hidden_size_per_head=32, mamba_d_state=16, mamba_num_heads=4,
    ),
    "lfm2": of(
        "lfm2", block_auto_adjust_ff_dim=False, block_dim=64, block_ff_dim=128,
        block_ffn_dim_multiplier=1.0, block_multiple_of=32, conv_L_cache=3, conv_bias=False,
        full_attn_idxs=[1], norm_eps=1e-6, num_hidden_layers=3, tie_word_embeddings=True,
    ),
    "recurrent_gemma": of(
        "recurrent_gemma", attention_window_size=WINDOW,
        block_types=["recurrent", "recurrent", "attention"], conv1d_width=4, logits_soft_cap=30.0,
        num_hidden_layers=3, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "baichuan_m1": of(
        "baichuan_m1", conv_window=2, num_swa_attention_heads=4, num_swa_key_value_heads=2,
        sliding_window=WINDOW, sliding_window_layers=[0],
    ),
}  # fmt: skip
