"""Configs of models with KV caches: full attention, sliding window or latent attention."""

from __future__ import annotations

from tests.models.configs import VOCABULARY, Config
from tests.models.zoo_parts import EXPERTS, LATENT, ROUTED, WINDOW, of

_SLIDING_THEN_FULL = ["sliding_attention", "sliding_attention", "full_attention"]

_LONGCAT: Config = {
    "attention_method": "MLA", "expert_ffn_hidden_size": 64, "ffn_hidden_size": 128,
    "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "moe_topk": 2, "n_routed_experts": 4,
    "num_layers": 2, "routed_scaling_factor": 1.0, "zero_expert_num": 2, "zero_expert_type": "identity",
}  # fmt: skip


def _gemma3n() -> Config:
    text = of(
        "gemma3n_text", activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0, 0.0], altup_active_idx=0,
        altup_coef_clip=120.0, altup_correct_scale=True, altup_num_inputs=2, final_logit_softcapping=30.0,
        hidden_size_per_layer_input=16, laurel_rank=16,
        layer_types=[*_SLIDING_THEN_FULL, "sliding_attention", "full_attention"], num_hidden_layers=5,
        num_kv_shared_layers=2, rope_local_base_freq=10000.0, sliding_window=WINDOW,
        tie_word_embeddings=True, vocab_size_per_layer_input=VOCABULARY,
    )  # fmt: skip
    return {"model_type": "gemma3n", "text_config": text, "tie_word_embeddings": True}


def _gemma4() -> Config:
    return of(
        "gemma4_text", global_head_dim=64, hidden_size_per_layer_input=16,
        layer_types=[*_SLIDING_THEN_FULL, "sliding_attention", "full_attention"], num_hidden_layers=5,
        num_kv_shared_layers=2, sliding_window=WINDOW, tie_word_embeddings=True, use_double_wide_mlp=False,
        vocab_size_per_layer_input=VOCABULARY,
    )  # fmt: skip


def _llama4() -> Config:
    text = of(
        "llama4_text", attention_chunk_size=WINDOW, interleave_moe_layer_step=2, intermediate_size_mlp=128,
        num_experts_per_tok=1, num_hidden_layers=4, num_local_experts=4, rope_scaling=None,
        use_qk_norm=True,
    )  # fmt: skip
    return {"model_type": "llama4", "text_config": text, "tie_word_embeddings": False}


def _deepseek_v41() -> Config:
    return of(
        "deepseek_v41", candidate_source_layer_id=-1, compress_ratios=[0, 4], hc_mult=2, index_head_dim=32,
        index_n_heads=2, index_source_layer_ids=[1], index_topk=8, kv_source_layer_ids=[1],
        moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=32,
        q_lora_rank=32, qk_rope_head_dim=16, sliding_window=WINDOW,
    )  # fmt: skip


FULL: dict[str, Config] = {
    "llama": of("llama"),
    "llama_4bit": of("llama", quantization={"bits": 4, "group_size": 32}),
    "qwen3_moe": of("qwen3_moe", EXPERTS),
    "mixtral": of("mixtral", num_experts_per_tok=2, num_local_experts=4),
    "afm7": of(
        "afm7", hidden_dim=64, num_heads=4, num_kv_heads=2, num_kv_reuse_layers=1, num_layers=3,
        tie_word_embeddings=True,
    ),
}  # fmt: skip

LATENT_ATTENTION: dict[str, Config] = {
    "deepseek_v3": of("deepseek_v3", LATENT, ROUTED),
    "deepseek_v32": of("deepseek_v32", LATENT, ROUTED, index_head_dim=32, index_n_heads=2, index_topk=24),
    "longcat_flash": of("longcat_flash", LATENT, _LONGCAT),
    "longcat_flash_ngram": of("longcat_flash_ngram", LATENT, _LONGCAT, ngram_vocab_size_ratio=3),
}
"""Latent attention: keys of one width, values of another or none."""

SLIDING: dict[str, Config] = {
    "llama_sliding": of("llama", layer_types=_SLIDING_THEN_FULL, num_hidden_layers=3, sliding_window=WINDOW),
    "gpt_oss": of(
        "gpt_oss", layer_types=["sliding_attention", "full_attention"] * 2, num_experts_per_tok=2,
        num_hidden_layers=4, num_local_experts=4, sliding_window=WINDOW,
    ),
    "olmo3": of("olmo3", layer_types=_SLIDING_THEN_FULL, num_hidden_layers=3, sliding_window=WINDOW),
    "exaone4": of(
        "exaone4",
        # Upstream reads the pattern, transformers the expanded list.
        layer_types=[*_SLIDING_THEN_FULL, "sliding_attention"], num_hidden_layers=4, rope_scaling=None,
        sliding_window=WINDOW, sliding_window_pattern="LLG",
    ),
    "gemma3n": _gemma3n(),
    "gemma4": _gemma4(),
    "iquestloopcoder": of("iquestloopcoder", loop_num=2, loop_window_size=WINDOW),
    "llama4": _llama4(),
}  # fmt: skip

OWN_CACHE: dict[str, Config] = {
    "deepseek_v41": _deepseek_v41(),
}
"""A cache that supports one row only."""
