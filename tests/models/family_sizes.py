"""Sizes of a tiny model under all the names that upstream's families use."""

from __future__ import annotations

from tests.models.configs import VOCABULARY, Config
from tests.models.zoo_parts import WINDOW

WIDTH = 64
CONTEXT = 4096
TOP_KEYS = 24
"""Keys selected by sparse attention. Fewer than a prompt has, as with a window."""

_WIDTHS: Config = dict.fromkeys(("hidden_size", "d_model", "n_embd", "model_dim", "embedding_size"), WIDTH)
_INNER: Config = dict.fromkeys(
    (
        "intermediate_size", "n_inner", "hidden_dim", "ffn_hidden_size", "ff_intermediate_size",
        "dense_intermediate_size", "intermediate_size_mlp",
    ),
    2 * WIDTH,
)  # fmt: skip
_LAYERS: Config = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2)
_HEADS: Config = {
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups", "n_shared_head"), 2
    ),
    "head_dim": 32, "hidden_size_per_head": 32, "kv_channels": 16,
}  # fmt: skip
_LENGTHS: Config = {
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length"), CONTEXT
    ),
    **dict.fromkeys(
        (
            "sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size",
            "window_size",
        ),
        WINDOW,
    ),
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window_pattern": 2,
    "index_topk": TOP_KEYS,
}  # fmt: skip
_NORMS: Config = dict.fromkeys(
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"), 1e-6
)
_ROTATION: Config = {
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "swa_rope_theta"), 10000.0),
    "partial_rotary_factor": 0.5, "rotary_dim": 16, "rotary_pct": 0.5,
}  # fmt: skip
_PLAIN: Config = {
    "attention_bias": False, "conv_bias": False, "dtype": "float32", "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh", "mlp_bias": False, "post_norm": False, "qk_norm": True,
    "tie_word_embeddings": False, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False,
    "num_vocab": VOCABULARY, "vocab_size": VOCABULARY,
}  # fmt: skip
_EXPERTS: Config = {
    **dict.fromkeys(
        (
            "moe_intermediate_size", "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size",
            "share_expert_dim", "shared_expert_intermediate_size", "shared_intermediate_size",
        ),
        WIDTH,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "n_group"), 2
    ),
    **dict.fromkeys(
        (
            "first_k_dense_replace", "num_dense_layers", "n_shared_experts", "num_shared_expert",
            "num_shared_experts", "topk_group", "decoder_sparse_step", "moe_layer_freq",
        ),
        1,
    ),
    "is_moe_layer": [False, True], "mlp_only_layers": [0], "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "use_expert_bias": True, "use_mixed_mlp_moe": True,
}  # fmt: skip
_LATENT: Config = {
    "index_head_dim": 32, "index_n_heads": 2, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
_STATES: Config = {
    "conv_kernel": 4, "group_norm_size": 2, "layer_group_size": 2, "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_value_head_dim": 32,
}  # fmt: skip
_OWN: Config = {
    "attention_multiplier": 0.2,  # granite
    "cla_share_factor": 2,  # hunyuan
    "dense_attention_every_n_layers": 2, "dim_model_base": WIDTH, "embedding_multiplier": 1.0,
    "gegelu_limit": 20.0, "logits_scaling": 1.0, "query_pre_attn_scalar": 32, "residual_multiplier": 1.0,
    "scale_depth": 1.4, "scale_emb": 1.0, "use_cla": False,
}  # fmt: skip

COMMON: Config = (
    _WIDTHS
    | _INNER
    | _LAYERS
    | _HEADS
    | _LENGTHS
    | _NORMS
    | _ROTATION
    | _PLAIN
    | _EXPERTS
    | _LATENT
    | _STATES
    | _OWN
)
"""Config keys from which most families can be built. Families ignore keys that they do not have."""


def of(family: str, **values: object) -> Config:
    """Return the config of a family: the common keys and its own."""
    return COMMON | {"model_type": family} | values


def nesting(family: str, text: Config) -> Config:
    """Return the config of a family whose language model's config is nested."""
    ends = {key: text[key] for key in ("tie_word_embeddings", "vocab_size")}
    return {"model_type": family, "dtype": "float32", "text_config": text} | ends


_DIVIDED = {
    *_WIDTHS, *_INNER, *_LAYERS, "num_attention_heads", "num_heads", "num_key_value_heads",
    "num_attention_groups", "linear_num_key_heads", "linear_num_value_heads", "o_groups",
    "sparse_num_index_heads", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
    "expert_ffn_hidden_size", "share_expert_dim", "shared_expert_intermediate_size",
    "shared_intermediate_size",
}  # fmt: skip
"""Sizes that are sharded across ranks."""


def thirds(config: Config) -> Config:
    """Return the config with every sharded size, and the width, enlarged by half so that three ranks can
    share it. Nested configs included."""
    layers = next((config[key] for key in _LAYERS if key in config), 0)
    return {key: _half_more(key, value, layers) for key, value in config.items()}


def _half_more(key: str, value: object, layers: int) -> object:
    if isinstance(value, dict):
        return thirds(value)
    if isinstance(value, list) and len(value) == layers and layers % 3:
        return [*value, *value[: layers // 2]]
    if isinstance(value, int) and key in _DIVIDED and value % 3:
        return value * 3 // 2
    return value
