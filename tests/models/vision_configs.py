"""Hugging Face files of the vision families: config.json and what their processors read.

Images have few patches, so that an image is a handful of tokens. Their number depends on the image's size
where it does so in the family.
"""

from __future__ import annotations

from tests.models.configs import VOCABULARY, Config, hybrid

CONTEXT_TOKENS = 4096
SIDE = 56
"""Image side in pixels, for families that resize all images to one size."""

Ids = dict[str, int]


def qwen3_5(ids: Ids) -> Config:
    """Qwen3.5 with its vision tower: recurrent states, attention and three-dimensional positions."""
    config = hybrid(ids)
    rope = config["text_config"]["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": [3, 3, 2]}
    text = config["text_config"] | {"rope_parameters": rope}
    vision = _qwen_vision("qwen3_5", 16) | {"deepstack_visual_indexes": []}
    named = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    return config | named | {"vision_config": vision} | _qwen_ids(ids)


def qwen3_vl(ids: Ids) -> Config:
    """Qwen3-VL: the vision tower's features are also added after the first layers (deepstack)."""
    text = _text("qwen3_vl_text", ids) | {
        "head_dim": 16,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default"},
    }
    vision = _qwen_vision("qwen3_vl", 16) | {"deepstack_visual_indexes": [0, 1]}
    return _whole("Qwen3VLForConditionalGeneration", "qwen3_vl", text, vision, ids) | _qwen_ids(ids)


def qwen2_5_vl(ids: Ids) -> Config:
    """Qwen2.5-VL: windowed attention in the vision tower; the text config is at the top level, not nested."""
    text = _text("qwen2_5_vl", ids) | {"rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"}}
    vision = _qwen_vision("qwen2_5_vl", 14) | {"fullatt_block_indexes": [1], "window_size": 56}
    whole = _whole("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", {}, vision, ids)
    del whole["text_config"]
    return text | whole | _qwen_ids(ids)


def gemma3(ids: Ids) -> Config:
    """Gemma 3: one size for all images, and sliding windows shorter than a prompt."""
    text = _text("gemma3_text", ids) | {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    }  # fmt: skip
    named = {
        "boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"],
        "hidden_size": 64, "image_token_index": ids["<image_soft_token>"], "mm_tokens_per_image": 4,
    }  # fmt: skip
    text |= {"mm_tokens_per_image": 4}
    whole = _whole("Gemma3ForConditionalGeneration", "gemma3", text, _vision("siglip_vision_model"), ids)
    return whole | named


def gemma4(ids: Ids) -> Config:
    """Gemma 4: per-layer input embeddings, layers that share keys, images of any shape."""
    text = _text("gemma4_text", ids) | {
        "global_head_dim": 16, "head_dim": 16, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "sliding_window": 24, "tie_word_embeddings": True,
        "use_double_wide_mlp": False, "vocab_size_per_layer_input": VOCABULARY,
    }  # fmt: skip
    vision = _vision("gemma4_vision") | {
        "default_output_length": 16, "global_head_dim": 16, "head_dim": 16, "num_key_value_heads": 2,
        "patch_size": 16, "pooling_kernel_size": 2, "position_embedding_size": 64,
    }  # fmt: skip
    named = {
        # Without this, upstream adds an audio tower of 300M parameters.
        "audio_config": None,
        "audio_token_id": ids["<|audio|>"], "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"], "hidden_size": 64, "image_token_id": ids["<|image|>"],
        "vision_soft_tokens_per_image": 16,
    }  # fmt: skip
    return _whole("Gemma4ForConditionalGeneration", "gemma4", text, vision, ids) | named


def mistral3(ids: Ids) -> Config:
    """Mistral 3: images of any size, with a break token after each row of patches."""
    text = _text("mistral", ids) | {"head_dim": 16}
    vision = _vision("pixtral") | {"head_dim": 16, "image_size": 112, "rope_theta": 10000.0}
    named = {
        "image_token_index": ids["[IMG]"], "multimodal_projector_bias": False, "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    }  # fmt: skip
    return _whole("Mistral3ForConditionalGeneration", "mistral3", text, vision, ids) | named


def llava(ids: Ids) -> Config:
    """LLaVA: Llama with a vision tower whose class token is dropped."""
    vision = _vision("clip_vision_model") | {"projection_dim": 32, "vocab_size": VOCABULARY}
    named = {
        "image_token_index": ids["<image>"], "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }  # fmt: skip
    return _whole("LlavaForConditionalGeneration", "llava", _text("llama", ids), vision, ids) | named


def idefics3(ids: Ids) -> Config:
    """Idefics3: an image as tiles and once more as a whole."""
    whole = _whole(
        "Idefics3ForConditionalGeneration", "idefics3", _text("llama", ids), _vision("idefics3_vision"), ids
    )
    return whole | {"image_token_id": ids["<image>"], "scale_factor": 2}


def smolvlm(ids: Ids) -> Config:
    """SmolVLM: Idefics3 with videos."""
    vision = _vision("smolvlm_vision")
    whole = _whole("SmolVLMForConditionalGeneration", "smolvlm", _text("llama", ids), vision, ids)
    return whole | {"image_token_id": ids["<image>"], "scale_factor": 2}


def internvl(ids: Ids) -> Config:
    """InternVL: an image as tiles that follow its shape, and a Qwen3."""
    vision = _vision("internvl_vision") | {"image_size": [SIDE, SIDE], "patch_size": [14, 14]}
    named = {"downsample_ratio": 0.5, "image_token_id": ids["<IMG_CONTEXT>"], "max_dynamic_patch": 4}
    text = _text("qwen3", ids) | {"head_dim": 16}
    return _whole("InternVLForConditionalGeneration", "internvl", text, vision, ids) | named


def _whole(architecture: str, kind: str, text: Config, vision: Config, ids: Ids) -> Config:
    return {
        "architectures": [architecture], "dtype": "float32", "eos_token_id": ids["<|im_end|>"],
        "model_type": kind, "pad_token_id": ids["<|endoftext|>"], "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "vision_config": vision, "vocab_size": VOCABULARY,
    }  # fmt: skip


def _text(kind: str, ids: Ids) -> Config:
    return {
        "attention_bias": False, "dtype": "float32", "eos_token_id": ids["<|im_end|>"],
        "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 128,
        "max_position_embeddings": CONTEXT_TOKENS, "model_type": kind, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "vocab_size": VOCABULARY,
    }  # fmt: skip


def _vision(kind: str) -> Config:
    return {
        "hidden_size": 32, "image_size": SIDE, "intermediate_size": 64, "model_type": kind,
        "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 2, "patch_size": 14,
    }  # fmt: skip


def _qwen_vision(kind: str, patch: int) -> Config:
    return {
        "depth": 2, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32, "in_channels": 3,
        "intermediate_size": 64, "model_type": kind, "num_heads": 2, "num_position_embeddings": 16,
        "out_hidden_size": 64, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip


def _qwen_ids(ids: Ids) -> Config:
    return {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_end_token_id": ids["<|vision_end|>"], "vision_start_token_id": ids["<|vision_start|>"],
    }  # fmt: skip
