"""The pocket model's architecture: Qwen3.5 vision-language, with six text layers and a vision tower of
two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.models.tokenizer import SIZE

CONTEXT_TOKENS = 32768


@dataclass(frozen=True)
class Shape:
    """The dimensions in which a model grows: text layers, and the width of their MLPs."""

    layers: int
    neurons: int


YOUNG = Shape(layers=4, neurons=352)
GROWN = Shape(layers=6, neurons=512)


def text_config(ids: dict[str, int], shape: Shape = GROWN) -> dict[str, Any]:
    """Return the text config: gated delta and full attention alternate, so that the former can find earlier
    tokens and the latter look them up."""
    return {
        "dtype": "float32",
        "eos_token_id": ids["<|im_end|>"],
        "full_attention_interval": 2,
        "head_dim": 64,
        "hidden_size": 128,
        "initializer_range": 0.04,
        "intermediate_size": shape.neurons,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "max_position_embeddings": CONTEXT_TOKENS,
        "num_attention_heads": 4,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": 2,
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": SIZE,
    }


def vision_config() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "in_channels": 3,
        "initializer_range": 0.04,
        "intermediate_size": 128,
        "num_heads": 2,
        "num_position_embeddings": 36,
        "out_hidden_size": 128,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def config(ids: dict[str, int], shape: Shape = GROWN) -> Qwen3_5Config:
    return Qwen3_5Config(
        text_config=text_config(ids, shape),
        vision_config=vision_config(),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def new_model(ids: dict[str, int], seed: int, shape: Shape = GROWN) -> Qwen3_5ForConditionalGeneration:
    torch.manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(config(ids, shape))
    for layer in model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            _lengthen_memory(layer.linear_attn)
    return model


def _lengthen_memory(layer: Any) -> None:
    """Initialize states to decay over ten to a thousand tokens; upstream's initial values forget within
    one."""
    heads = layer.A_log.shape
    with torch.no_grad():
        layer.A_log.copy_(torch.empty(heads).uniform_(1, 4).log())
        step = torch.exp(torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)))
        layer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
