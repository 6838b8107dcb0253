"""Hugging Face JSON files of the three main test architectures."""

from __future__ import annotations

from typing import Any

VOCABULARY = 2048
"""Rows of the embedding. Larger than the tokenizer's vocabulary, as in Qwen; ids 2000 to 2047 have no
text."""

Config = dict[str, Any]


def context_tokens(config: Config) -> int:
    """Return the longest sequence that the model accepts, in tokens."""
    return int((config | config.get("text_config", {}))["max_position_embeddings"])


def dense(ids: dict[str, int]) -> Config:
    """Qwen3: full attention with grouped heads and query/key norms, an output layer of its own."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "dtype": "float32",
        "eos_token_id": ids["<|im_end|>"], "head_dim": 64, "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 192, "max_position_embeddings": 4096, "model_type": "qwen3",
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "pad_token_id": ids["<|endoftext|>"], "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "vocab_size": VOCABULARY,
    }  # fmt: skip


def hybrid(ids: dict[str, int]) -> Config:
    """Qwen3.5 without its vision tower: three gated-delta layers, then one of full attention.

    The head sizes are multiples of 32, which upstream's Metal kernel for the recurrence requires.
    """
    text = {
        "attention_bias": False, "dtype": "float32", "eos_token_id": ids["<|im_end|>"],
        "full_attention_interval": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 192, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 32,
        "max_position_embeddings": 32768, "model_type": "qwen3_5_text", "num_attention_heads": 4,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": ids["<|endoftext|>"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "dtype": "float32", "eos_token_id": ids["<|im_end|>"],
        "model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True,
    }  # fmt: skip


def sliding(ids: dict[str, int]) -> Config:
    """Gemma 3: of six layers, the third and the last have full attention; the others have a window of 32
    tokens."""
    return {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "dtype": "float32",
        "eos_token_id": ids["<|im_end|>"], "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64, "intermediate_size": 192, "max_position_embeddings": 4096,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 6,
        "num_key_value_heads": 2, "pad_token_id": ids["<|endoftext|>"], "query_pre_attn_scalar": 32,
        "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
        "sliding_window": 32, "sliding_window_pattern": 3, "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    }  # fmt: skip


CONFIGS = {"dense": dense, "hybrid": hybrid, "sliding": sliding}


def generation_config(ids: dict[str, int]) -> Config:
    """Return generation_config.json. It names both end tokens, as Qwen's does."""
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    return {"eos_token_id": ends, "pad_token_id": ids["<|endoftext|>"]}
