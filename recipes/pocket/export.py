"""Export to a Hugging Face folder: weights, configurations, and image-processor settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.pocket import weights
from recipes.pocket.batches import FRAMES, MERGE, PATCH
from recipes.pocket.model import text_config, vision_config

# Two by two tokens for a square image, the size that the model is trained on.
_PIXELS = 64 * 64


def export(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model beside its tokenizer's files, which `folder` contains already."""
    ids = tokenizer.get_vocab()
    weights.write(model, folder / "model.safetensors")
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    _write(folder / "config.json", _config(ids))
    _write(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1], "temperature": 0.0},
    )
    images = _image_processor("Qwen2VLImageProcessor")
    _write(folder / "preprocessor_config.json", images | {"processor_class": "Qwen3VLProcessor"})
    _write(folder / "video_preprocessor_config.json", _image_processor(None) | {
        "processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor",
    })  # fmt: skip


def _config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "float32",
        "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_5",
        "quantization": weights.SETTINGS,
        "text_config": text_config(ids) | {"attention_bias": False, "hidden_act": "silu",
                                           "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6},
        "tie_word_embeddings": True,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision_config() | {"deepstack_visual_indexes": [], "hidden_act": "gelu_pytorch_tanh",
                                            "model_type": "qwen3_5_vision"},
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }  # fmt: skip


def _image_processor(kind: str | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "size": {"longest_edge": _PIXELS, "shortest_edge": _PIXELS},
        "temporal_patch_size": FRAMES,
    }
    return settings | ({"image_processor_type": kind} if kind else {})


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
